"""`flashduet bench engine`: the table of what the engines promise, measured here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from flashduet.errors import ConfigurationError
from flashduet.hardware import usable_cores
from flashduet.settings import DtypeChoice
from flashduet_cli import options
from flashduet_cli.bench.figures import Figure
from flashduet_cli.bench.plot import plot as draw
from flashduet_cli.bench.prompts import load_prompts
from flashduet_cli.bench.report import BenchReport
from flashduet_cli.bench.run import measure
from flashduet_cli.bench.table import ROWS, Row
from flashduet_cli.bench.workbench import BenchSettings, Workbench
from flashduet_cli.compiling import compile_target
from flashduet_cli.console import err, fail, note, print_json, run, wide
from flashduet_cli.pull import pull_in_thread
from flashduet_cli.stack_config import StackConfig

bench_app = typer.Typer(no_args_is_help=True, help="Measure how fast it is.")


@bench_app.callback()
def bench() -> None:
    """Measure how fast it is."""


@bench_app.command(short_help="Measure the engines against their floors and goals.")
def engine(
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with id and turns; the first turn is used. Default: own questions.",
            envvar="FLASHDUET_BENCH_PROMPTS",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Measure only this row (repeatable); see --list.", show_default=False),
    ] = None,
    show_rows: Annotated[bool, typer.Option("--list", help="Name the rows and end.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few, short samples: whether a row works at all.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the JSON object here, anew after each row.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the table into this PNG.", show_default=False)
    ] = None,
    dtype: Annotated[DtypeChoice, typer.Option(help="Of target, draft and peer.")] = "bfloat16",
    model: options.Model = None,
    drafter: options.Drafter = None,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure the engines against their floors and goals.

    Starts stacks and peers of its own and measures ratios in turn, A B A B, in one run. The machine
    should do nothing else meanwhile. Exits with 1 if a floor is missed.
    """
    if show_rows:
        for row in ROWS:
            typer.echo(f"{row.name:<16} {row.title}")
        return
    if dtype == "auto":
        fail("--dtype: the same for all is needed here; give float32, bfloat16 or float16", 2)
    rows = _chosen(only)
    config = StackConfig(
        model=model,
        drafter=drafter,
        dtype=dtype,
        device="cpu",
        threads=threads,
        free_ports=True,
    )
    if not config.has_drafter:
        fail(f"no drafter is known for {config.model_reference}; name one with --drafter", 2)
    report = BenchReport(
        {
            "model": config.model_reference,
            "drafter": config.drafter or "default",
            "dtype": dtype,
            "threads": threads or usable_cores(),
            "prompts": prompts.name if prompts else "own",
            "quick": quick,
        }
    )
    try:
        run(_measure(config, prompts, quick, verbose, rows, report, out))
    finally:
        if as_json:
            print_json(report.as_dict())
        elif report.figures:
            wide().print(report.table())
    if plot is not None:
        run(_draw(report, plot))
    if not report.passed or len(report.figures) < len(rows):
        raise typer.Exit(1)


async def _measure(
    config: StackConfig,
    prompts_file: Path | None,
    quick: bool,
    verbose: bool,
    rows: Sequence[Row],
    report: BenchReport,
    out: Path | None,
) -> None:
    if os.getloadavg()[0] > 0.5:
        note(f"the machine is busy (load {os.getloadavg()[0]:.1f}): figures will say little")
    folder = await pull_in_thread(config.model_reference)
    prompts = await asyncio.to_thread(load_prompts, prompts_file, folder)
    try:
        # Before anything is measured: a start would compile in the background.
        await compile_target(config)
    except ConfigurationError as error:
        note(f"steps run uncompiled: {error.message}")

    def told(figure: Figure) -> None:
        report.figures.append(figure)
        if out is not None:
            report.write(out)
        _tell(figure)

    async with Workbench(BenchSettings(config, folder, prompts, quick, verbose)) as workbench:
        await measure(workbench, rows, told)


async def _draw(report: BenchReport, file: Path) -> None:
    await asyncio.to_thread(draw, report, file)


def _chosen(only: list[str] | None) -> list[Row]:
    wanted = [name.strip() for given in only or [] for name in given.split(",") if name.strip()]
    known = [row.name for row in ROWS]
    if unknown := [name for name in wanted if name not in known]:
        fail(f"--only {', '.join(unknown)}: there are {', '.join(known)}", 2)
    return [row for row in ROWS if not wanted or row.name in wanted]


def _tell(figure: Figure) -> None:
    shown = figure.error
    if figure.measured is not None:
        shown = figure.bounds.show(figure.measured.estimate.value)
    line = Text(f"{figure.row}: {shown} ({figure.verdict}, {figure.seconds:.0f} s)")
    err.print(line, soft_wrap=True)
