"""`flashduet train ablate`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from drafter_training import cli_options as options

_MEASURED = 64
"""Held-out sequences that a variant is measured on: twice a run's, for differences are small."""


def ablate(
    name: Annotated[
        str,
        typer.Argument(
            help="layers, features, block, short-blocks, anchors, weighting, distillation, start, "
            "rate or injection."
        ),
    ],
    data: options.Data,
    target: options.Target = "default",
    preset: options.PresetName = "default",
    out: options.Out = None,
    steps: Annotated[int, typer.Option(min=1, help="Of each variant.")] = 300,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Of each, instead of steps: by cost.", show_default=False),
    ] = None,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Train every variant briefly from the same start on the same data, and compare tau."""
    from drafter_training.ablations import ABLATIONS, SERVED_LENGTHS, Ablation
    from drafter_training.stages import open_workspace

    if name not in ABLATIONS:
        options.fail(f"{name!r} given, one of {', '.join(ABLATIONS)} expected", 2)
    rows = []
    with options.reported():
        workspace = open_workspace(target or "default", preset, out, threads)
        settings = replace(
            workspace.preset.train,
            steps=None if minutes else steps,
            minutes=minutes,
            checkpoint_seconds=float("inf"),
            held_out=_MEASURED,
            seed=seed,
        )
        for row in Ablation(workspace, data, settings).run(name):
            options.note(f"{row.variant}: tau {row.tau:.3f} after {row.steps} steps")
            rows.append(row)
    if as_json:
        typer.echo(json.dumps({"ablation": name, "rows": [asdict(row) for row in rows]}))
        return
    served = SERVED_LENGTHS if name == "block" else ()
    columns = [f"tau served at {length}" for length in served]
    table = Table(name, "steps", "seconds", "held-out loss", "tau", *columns)
    for row in rows:
        table.add_row(
            row.variant,
            str(row.steps),
            f"{row.seconds:.0f}",
            f"{row.held_out_loss:.3f}",
            f"{row.tau:.3f}",
            *(f"{row.tau_at[length]:.3f}" for length in served),
        )
    Console().print(table)
