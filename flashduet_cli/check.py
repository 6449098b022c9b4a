"""`flashduet check`: claims that a user can test on their own machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from flashduet.errors import ConfigurationError, InvalidRequest
from flashduet.sampling.params import Sampling
from flashduet.settings import DtypeChoice
from flashduet_cli import options
from flashduet_cli.console import err, fail, note, out, print_json, run
from flashduet_cli.lossless.report import Difference, Report
from flashduet_cli.lossless.run import Check, CheckSettings
from flashduet_cli.pull import pull_in_thread
from flashduet_cli.stack_config import StackConfig

# Without a terminal, progress is a line every so many answers.
PLAIN_PROGRESS_STEP = 10

check_app = typer.Typer(no_args_is_help=True, help="Test what Flashduet promises.")


@check_app.callback()
def check() -> None:
    """Test what Flashduet promises."""


@check_app.command(short_help="Compare token ids with and without drafting.")
def lossless(
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with id and turns; the first turn is used.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 96,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many prompts.", show_default=False)
    ] = None,
    dtype: Annotated[DtypeChoice, typer.Option(help="Data type of all.")] = "float32",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass kept, in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.")] = 0,
    block_lengths: Annotated[
        str, typer.Option(help="Besides the drafter's own: comma-separated, e.g. 4,8,16.")
    ] = "",
    random_drafter: Annotated[
        bool, typer.Option("--random-drafter", help="Also with a drafter of random weights.")
    ] = False,
    official: Annotated[
        bool,
        typer.Option(
            "--official", help="Also by the package `dflash`, in this process; greedy only."
        ),
    ] = False,
    partial: Annotated[
        Path | None,
        typer.Option(help="Append every answer to this file at once.", show_default=False),
    ] = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    transport: options.Transport = None,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Compare token ids with drafting on, with drafting off, and from Transformers itself.

    Starts its own stack. Exits with 1 on any difference that is not a near-tie, which is one whose
    top-2 gap, recomputed in float64, is within twice the rounding error measured there. No
    penalties or logit bias are asked for: a near-tie under them could not be told.
    """
    try:
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    except InvalidRequest as error:
        fail(error.message, 2)
    if dtype == "auto":
        fail("--dtype: the same for all is needed here; give float32, bfloat16 or float16", 2)
    if official and not sampling.greedy:
        fail("--official: greedy only, for the package samples with noise of its own", 2)
    config = StackConfig(
        model=model,
        drafter=drafter,
        dtype=dtype,
        device="cpu",
        transport=transport,
        threads=threads,
        free_ports=True,
    )
    if not config.has_drafter:
        fail(f"no drafter is known for {config.model_reference}; name one with --drafter", 2)
    if official:
        from flashduet_cli.lossless.official import check_installed

        try:
            check_installed()
        except ConfigurationError as error:
            fail(error.message, 2)
    settings = CheckSettings(
        config=config,
        prompts_file=prompts,
        limit=limit,
        dtype=dtype,
        max_tokens=max_tokens,
        sampling=sampling,
        block_lengths=_block_lengths(block_lengths),
        random_drafter=random_drafter,
        official=official,
        partial=partial,
        verbose=verbose,
    )
    reports: list[Report] = []
    try:
        run(_lossless(settings, reports))
    finally:
        for report in reports:
            print_json(report.as_dict()) if as_json else _print(report)
    if not reports[0].passed:
        raise typer.Exit(1)


async def _lossless(settings: CheckSettings, reports: list[Report]) -> None:
    """Run the check; its report is put into `reports` first, to outlive an interruption."""
    from flashduet_cli.prompt_file import read_prompts

    folder = await pull_in_thread(settings.config.model_reference)
    prompts = await asyncio.to_thread(read_prompts, settings.prompts_file, folder, settings.limit)
    with _ProgressBar(len(prompts), len(settings.modes())) as bar:
        check = Check(settings, folder, prompts, bar.answered)
        reports.append(check.report)
        await check.run()


class _ProgressBar:
    """One bar over all answers of all modes; without a terminal, a line now and then."""

    def __init__(self, prompts: int, modes: int) -> None:
        self._prompts, self._total = prompts, prompts * modes
        self._done = 0
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=err,
        )
        self._task: TaskID = self._progress.add_task("starting", total=self._total)

    def answered(self, mode: str, done: int) -> None:
        self._done += 1
        self._progress.update(self._task, completed=self._done, description=mode)
        last = done == self._prompts
        if not err.is_terminal and (last or done % PLAIN_PROGRESS_STEP == 0):
            note(
                f"{mode}: {done} of {self._prompts} prompts ({self._done} of {self._total} in all)"
            )

    def __enter__(self) -> _ProgressBar:
        if err.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if err.is_terminal:
            self._progress.stop()


def _block_lengths(value: str) -> list[int]:
    try:
        lengths = [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        fail(f"--block-lengths: {value!r} is not a comma-separated list of numbers", 2)
    if any(length < 2 for length in lengths):
        fail("--block-lengths: 2 (one draft token) is the shortest", 2)
    return lengths


def _print(report: Report) -> None:
    verdict = "lossless" if report.passed else "NOT SHOWN" if not report.complete else "FAILED"
    style = "bold green" if report.passed else "bold red"
    line = (
        f"{report.identical} of {report.prompts} prompts identical in {len(report.modes)} modes, "
        f"{len(report.near_ties)} near-ties, {len(report.differences)} other differences "
        f"({report.seconds:.0f} s)"
    )
    out.print(Text(f"{verdict}: ", style=style) + Text(line), soft_wrap=True)
    for mode in report.undrafted_modes():
        out.print(f"{mode}: nothing was drafted, so it shows nothing", style="red")
    table = Table("mode", "prompts", "tokens", "rounds", "acceptance length")
    for mode in report.modes:
        numbers = report.mode_figures(mode)
        table.add_row(
            mode,
            str(numbers["prompts"]),
            str(numbers["tokens"]),
            str(numbers["rounds"] or ""),
            f"{numbers['acceptance_length']:.2f}" if numbers["rounds"] else "",
        )
    out.print(table)
    for kind, found in (("near-tie", report.near_ties), ("difference", report.differences)):
        for difference in found:
            out.print(Text(_line(kind, difference)), soft_wrap=True)


def _line(kind: str, difference: Difference) -> str:
    judgement = difference.judgement
    return (
        f"{kind}: {difference.prompt_id}, {difference.mode}, answer token {difference.position}: "
        f"{difference.base_token} or {difference.mode_token}, {judgement.quantity} gap "
        f"{judgement.gap:.3g}, bound {judgement.bound:.3g}"
    )
