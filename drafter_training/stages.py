"""The stages of one command, with their progress on the terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import transformers
import typer
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from drafter_training.cli_options import INTERRUPTED, err, note
from drafter_training.data_command import make_data
from drafter_training.presets import PRESETS
from drafter_training.run_command import RunCommand, RunReport
from drafter_training.run_record import PLOT_FILE
from drafter_training.target import target_folder
from drafter_training.trainer import STATE, Trainer
from drafter_training.trainer import Progress as Step
from drafter_training.workspace import Workspace
from flashduet.errors import ConfigurationError
from flashduet.models import served_name
from flashduet.models_cache import cache_root

PLAIN_PROGRESS_SECONDS = 60.0


def quiet(threads: int | None) -> None:
    """Only our own bars and words on the terminal; compute threads as asked for."""
    if threads is not None:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def open_workspace(target: str, preset: str, out: Path | None, threads: int | None) -> Workspace:
    """The workspace that the options name.

    Raises:
        ConfigurationError: no such preset, or the target cannot be had.
    """
    if preset not in PRESETS:
        raise ConfigurationError(
            f"--preset: {preset!r} given, one of {', '.join(PRESETS)} expected"
        )
    quiet(threads)
    name = served_name(target).replace("/", "--")
    root = out or cache_root() / "training" / f"{name}-{preset}"
    return Workspace(target_folder(target), root, PRESETS[preset])


def make(
    workspace: Workspace,
    *,
    resume: bool,
    prompts: list[Path],
    answer_tokens: int,
    minutes: float | None,
    init_from: Path | None,
    device: str,
    seed: int,
) -> RunReport:
    """Data, features, training."""
    preset = workspace.preset
    run = workspace.run_folder
    if (run / STATE).exists() and not resume:
        raise ConfigurationError(
            f"{workspace.root} holds a run; --resume continues it, --out begins another one"
        )
    generate(
        workspace,
        workspace.data_folder,
        prompts=prompts,
        answer_tokens=answer_tokens,
        seconds=float("inf"),
        keep_features=True,
        seed=seed,
    )
    settings = replace(preset.train, minutes=minutes, seed=seed)
    command = RunCommand(
        workspace,
        [workspace.data_folder],
        run,
        settings,
        resume=resume,
        command=sys.argv,
        init_from=init_from,
        device=device,
    )
    return follow(command)


def generate(
    workspace: Workspace,
    folder: Path,
    *,
    prompts: list[Path],
    answer_tokens: int,
    seconds: float,
    keep_features: bool,
    seed: int,
    passages_from: Path | None = None,
) -> None:
    """The data stage."""
    with _bar("answers", "tokens") as show:
        shards = make_data(
            workspace.target_folder,
            folder,
            replace(workspace.preset.data, seed=seed),
            prompt_files=prompts,
            answer_tokens=answer_tokens,
            seconds=seconds,
            slots=workspace.preset.slots,
            cache=workspace.cache() if keep_features else None,
            layer_ids=workspace.layer_ids if keep_features else None,
            passages_from=passages_from,
            report=lambda done: show(min(done, answer_tokens), answer_tokens, ""),
        )
    if shards.broken:
        note(f"made again, for their hash was wrong: shards {', '.join(map(str, shards.broken))}")
    note(f"{len(shards)} shards with {shards.answer_tokens} answer tokens in {folder}")


def follow(command: RunCommand) -> RunReport:
    """The training stage; the first SIGINT or SIGTERM saves and ends it."""
    with _bar("features", "shards") as show:
        shown: list[Callable[[int, int, str], None]] = [show]

        def started(trainer: Trainer, start: str) -> None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: trainer.stop())
            begun = f"resuming at step {trainer.step}" if trainer.step else f"starting from {start}"
            note(f"{begun}; {_length(trainer)}")

        with _bar("training", "") as training:

            def step(progress: Step) -> None:
                training(int(1000 * progress.done), 1000, _line(progress))
                if progress.measured is not None:
                    note(_measured(progress))

            report = command.run(step, lambda done, total: shown[0](done, total, ""), started)
    if not report.finished:
        note(f"stopped at step {report.step}; --resume goes on")
        raise typer.Exit(INTERRUPTED)
    plot = report.drafter.parent / PLOT_FILE
    note(
        f"tau on held-out greedy answers, teacher forced: {report.tau_before:.3f} before, "
        f"{report.tau:.3f} after {report.step} steps"
    )
    if not plot.exists():
        note("no plot: matplotlib is not installed (the extra `bench` has it)")
    typer.echo(str(report.drafter))
    return report


def _length(trainer: Trainer) -> str:
    minutes = trainer.settings.minutes
    return f"{trainer.total_steps} steps" if minutes is None else f"{minutes:g} minutes"


def _line(progress: Step) -> str:
    return f"step {progress.step} loss {progress.loss:.3f}"


def _measured(progress: Step) -> str:
    measured = progress.measured
    assert measured is not None
    return (
        f"step {measured.step}: loss {measured.loss:.3f}; held out: loss "
        f"{measured.held_out_loss:.3f}, tau {measured.block_tau:.3f} at random anchors, "
        f"{measured.tau:.3f} decoding"
    )


@contextmanager
def _bar(name: str, unit: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar with what is left; without a terminal, a line every so many seconds."""
    columns: list[ProgressColumn] = [
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn(
            "{task.completed:.0f} of {task.total:.0f} " + unit
            if unit
            else "{task.percentage:.0f} %"
        ),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    ]
    shown = err.is_terminal and int(os.environ.get("RANK", "0")) == 0
    with Progress(*columns, console=err, disable=not shown, transient=True) as progress:
        task = progress.add_task(name, total=None, words="", visible=False)
        said = time.monotonic()

        def show(done: int, total: int, words: str) -> None:
            nonlocal said
            progress.update(task, completed=done, total=total, words=words, visible=True)
            if not shown and time.monotonic() - said > PLAIN_PROGRESS_SECONDS:
                said = time.monotonic()
                note(f"{name}: {100 * done / max(total, 1):.0f} % {words}".rstrip())

        yield show
