"""`flashduet eval`: how many tokens a round a drafter is worth, on real decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from drafter_training.cli_options import temperatures as parsed_temperatures
from flashduet.settings import LONGEST_LOOKUP, DtypeChoice, LookupSettings
from flashduet_cli import options
from flashduet_cli.console import err, fail, note, out, print_json, run
from flashduet_cli.evaluation.plot import plot as draw
from flashduet_cli.evaluation.run import EvalSettings, Evaluation
from flashduet_cli.pull import pull_in_thread
from flashduet_cli.stack_config import StackConfig

# Without a terminal, progress is a line every so many answers.
PLAIN_PROGRESS_STEP = 20


def evaluate(
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with id, turns and category; first turns are used.")
    ],
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many of each category.", show_default=False),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,1",
    seed: options.Seed = None,
    block_length: Annotated[
        int | None,
        typer.Option(min=2, help="Anchor and drafts. Default: as trained.", show_default=False),
    ] = None,
    lookup: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=LONGEST_LOOKUP,
            help="Tokens that must repeat to be copied, not drafted; 0: the drafter alone. "
            "Default: as the draft service.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 1,
    teacher_forced: Annotated[
        bool, typer.Option(help="Also walk the greedy answers without the services.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figures into this PNG.", show_default=False)
    ] = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: Annotated[DtypeChoice, typer.Option(help="Data type of all.")] = "bfloat16",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure the acceptance length through the services, greedy and sampled.

    Starts its own stack with a patient gateway: acceptance is measured, not speed. Beside it stand
    what prompt lookup accepts of the same answers, and τ without answers that repeat themselves.
    """
    config = StackConfig(
        model=model, drafter=drafter, dtype=dtype, device="cpu", threads=threads, free_ports=True
    )
    if not config.has_drafter:
        fail(f"no drafter is known for {config.model_reference}; name one with --drafter", 2)
    if dtype not in ("float32", "bfloat16"):
        fail(f"--dtype: {dtype} given, float32 or bfloat16 expected", 2)
    report = run(
        _evaluate(
            config,
            prompts,
            limit,
            dtype=dtype,
            max_tokens=max_tokens,
            temperatures=parsed_temperatures(temperatures),
            seed=seed or 0,
            block_length=block_length,
            lookup=lookup,
            concurrency=concurrency,
            teacher_forced=teacher_forced,
            verbose=verbose,
        )
    )
    if plot is not None:
        run(asyncio.to_thread(draw, report, plot))
    print_json(report) if as_json else _print(report)


async def _evaluate(
    config: StackConfig, file: Path, limit: int | None, *, lookup: int | None, **settings: Any
) -> dict[str, Any]:
    from flashduet_cli.prompt_file import read_prompts

    settings["lookup"] = LookupSettings.load().lookup if lookup is None else lookup
    folder = await pull_in_thread(config.model_reference)
    prompts = await asyncio.to_thread(read_prompts, file, folder, limit_each=limit)
    total = len(prompts) * len(settings["temperatures"])
    done = 0

    def answered(mode: str) -> None:
        nonlocal done
        done += 1
        if done % PLAIN_PROGRESS_STEP == 0 or done == total or err.is_terminal:
            note(f"{mode}: {done} of {total} answers")

    evaluation = Evaluation(
        EvalSettings(config=config, model_folder=folder, **settings), prompts, answered
    )
    return await evaluation.run()


def _print(report: Mapping[str, Any]) -> None:
    runs = {name: part for name, part in report.items() if isinstance(part, dict)}
    title = f"{report['drafter']}, block length {report['block_length']}: tokens a round"
    table = Table("", *runs, title=title, title_justify="left")
    for category in next(iter(runs.values()))["by_category"]:
        table.add_row(category, *(_tau(part["by_category"][category]) for part in runs.values()))
    table.add_section()
    table.add_row("overall", *(_tau(part["overall"]) for part in runs.values()), style="bold")
    table.add_row(
        "without looping answers",
        *(f"{_tau(p['without_loops'])} ({p['looping_answers']} loop)" for p in runs.values()),
    )
    table.add_row(
        "prompt lookup", *(f"{part['prompt_lookup']['overall']:.3f}" for part in runs.values())
    )
    forced = [part.get("teacher_forced") for part in runs.values()]
    if any(forced):
        table.add_row("teacher forced", *(f"{f['overall']:.3f}" if f else "" for f in forced))
        if report["lookup"]:
            alone = (f"{f['drafter_alone']:.3f}" if f else "" for f in forced)
            table.add_row("drafter alone, teacher forced", *alone)
    out.print(table)
    table = Table("slot", *runs, title="rounds that accept it", title_justify="left")
    for slot in range(report["block_length"] - 1):
        table.add_row(str(slot + 1), *(f"{part['by_slot'][slot]:.3f}" for part in runs.values()))
    out.print(table)
    for name, part in runs.items():
        for reason, count in part["undrafted_rounds"].items():
            out.print(f"{name}: {count} rounds without a proposal ({reason})", style="dim")


def _tau(tau: Mapping[str, float]) -> str:
    return f"{tau['tau']:.3f}" if tau["rounds"] else "none"
