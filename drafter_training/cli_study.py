"""`flashduet train study`: short studies of how drafts are made and taken, each by one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from drafter_training import cli_options as options
from flashduet.settings import LONGEST_LOOKUP

if TYPE_CHECKING:
    from drafter_training.study_command import Study

study_app = typer.Typer(no_args_is_help=True, help="Short studies of drafts, teacher forced.")

Drafter = Annotated[
    Path | None,
    typer.Option(help="A drafter's folder. Default: the shipped one.", show_default=False),
]
Sequences = Annotated[int, typer.Option(min=1, help="Answers looked at.")]
AnswerLength = Annotated[int, typer.Option(min=16, help="Tokens of each, at most.")]


@study_app.callback()
def study() -> None:
    """Short studies of drafts, teacher forced."""


@study_app.command(short_help="How drafts are taken, by temperature.")
def sampling(
    target: options.Target = "default",
    drafter: Drafter = None,
    out: options.Out = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.3,0.6,0.8,1.0",
    sequences: Sequences = 64,
    answer_length: AnswerLength = 96,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Tokens a round at all positions: position-keyed noise, rejection sampling, greedy drafts."""
    wanted = options.temperatures(temperatures)
    with options.reported():
        study = _open(target, drafter, out, sequences, answer_length, threads)
        found = {temperature: study.sampling(temperature) for temperature in wanted}
    if as_json:
        typer.echo(json.dumps({"tokens_a_round": {f"{t:g}": row for t, row in found.items()}}))
        return
    names = ("position-keyed", "rejection", "greedy drafts")
    table = Table("temperature", *names, title="tokens a round, teacher forced")
    for temperature, row in found.items():
        cells = [f"{row[name]:.3f}" if name in row else "" for name in names]
        table.add_row(f"{temperature:g}", *cells)
    Console().print(table)


@study_app.command(short_help="Slots after the first miss; a second pass.")
def slots(
    target: options.Target = "default",
    drafter: Drafter = None,
    out: options.Out = None,
    keep: Annotated[str, typer.Option(help="Drafts kept before a second pass.")] = "1,2,3",
    sequences: Sequences = 64,
    answer_length: AnswerLength = 96,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Would slots behind the first miss have been right, and does denoising twice pay?"""
    kept = options.numbers(keep, "--keep", 1)
    with options.reported():
        study = _open(target, drafter, out, sequences, answer_length, threads)
        cascade, taus = study.slots(kept)
    rows = [
        {"miss": miss + 1, "blocks": blocks, "next_right": right, "right_run": run}
        for miss, (blocks, right, run) in enumerate(
            zip(cascade.misses, cascade.next_right, cascade.run, strict=True)
        )
    ]
    if as_json:
        typer.echo(json.dumps({"cascade": rows, "tau_by_drafts_kept": taus}))
        return
    table = Table("first miss at slot", "blocks", "next slot right", "right slots in a row behind")
    for row in rows:
        count = max(row["blocks"], 1)
        table.add_row(
            str(row["miss"]),
            str(row["blocks"]),
            f"{row['next_right'] / count:.3f}",
            f"{row['right_run'] / count:.3f}",
        )
    Console().print(table)
    table = Table("drafts kept before the second pass", "tau of greedy decoding")
    for name, tau in taus.items():
        table.add_row("one pass only" if name == "0" else name, f"{tau:.3f}")
    Console().print(table)


@study_app.command(short_help="Copies of the text beside the drafter.")
def lookup(
    target: options.Target = "default",
    drafter: Drafter = None,
    out: options.Out = None,
    least: Annotated[
        str, typer.Option(help="Tokens that must repeat to be copied; 0: no copies.")
    ] = "0,2,3,4,6,8,12",
    sequences: Sequences = 64,
    answer_length: AnswerLength = 96,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """What drafts copied from the text bring, by how much must repeat first."""
    repeated = options.numbers(least, "--least", 0, LONGEST_LOOKUP)
    with options.reported():
        study = _open(target, drafter, out, sequences, answer_length, threads)
        taus = study.lookup(repeated)
    if as_json:
        typer.echo(json.dumps({"tau_by_tokens_repeated": taus}))
        return
    table = Table("tokens that must repeat", "tau of greedy decoding")
    for name, tau in taus.items():
        table.add_row("no copies" if name == "0" else name, f"{tau:.3f}")
    Console().print(table)


def _open(
    target: str | None,
    drafter: Path | None,
    out: Path | None,
    sequences: int,
    answer_length: int,
    threads: int | None,
) -> Study:
    from drafter_training.stages import open_workspace
    from drafter_training.study_command import Study, StudyData
    from flashduet.models_default import shipped_drafter

    workspace = open_workspace(target or "default", "default", out, threads)
    folder = workspace.root / f"study-{sequences}x{answer_length}"
    return Study(
        workspace.target_folder,
        drafter or shipped_drafter(),
        StudyData(folder, sequences, answer_length),
    )
