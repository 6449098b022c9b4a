"""`flashduet train shortlist`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from drafter_training import cli_options as options


def shortlist(
    data: options.Data,
    drafter: Annotated[Path, typer.Option(help="The drafter's folder.")],
    target: options.Target = "default",
    out: options.Out = None,
    sizes: Annotated[
        str, typer.Option(help="Comma-separated; 0 is the whole vocabulary.")
    ] = "4096,8192,16384,0",
    write: Annotated[
        int | None,
        typer.Option(min=1, help="Put a shortlist of this size beside it.", show_default=False),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Held-out answers looked at.")] = 32,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Which tokens to draft from: tau and time by the size of the draft vocabulary."""
    from draft_service.shortlist import write_shortlist
    from drafter_training.stages import open_workspace
    from drafter_training.vocabulary_study import VocabularyStudy

    with options.reported():
        workspace = open_workspace(target or "default", "default", out, threads)
        study = VocabularyStudy(workspace, data, drafter, sequences)
        rows = list(study.rows(options.numbers(sizes, "--sizes", 0)))
        if write is not None:
            write_shortlist(drafter, study.shortlist(write))
    if as_json:
        typer.echo(json.dumps({"sizes": [asdict(row) for row in rows]}))
        return
    table = Table("tokens drafted from", "of the answers' tokens", "tau", "head of a block, ms")
    for row in rows:
        table.add_row(
            str(row.size), f"{100 * row.covered:.2f} %", f"{row.tau:.3f}", f"{row.head_ms:.2f}"
        )
    Console().print(table)
