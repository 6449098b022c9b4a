"""`flashduet train`: a drafter for any target, from no data to a checkpoint to serve.

Nothing heavy is imported before a command runs, so that help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drafter_training import cli_options as options
from drafter_training.cli_ablate import ablate
from drafter_training.cli_data import data
from drafter_training.cli_run import run
from drafter_training.cli_score import score
from drafter_training.cli_shortlist import shortlist
from drafter_training.cli_study import study_app
from flashduet.errors import FlashduetError

if TYPE_CHECKING:
    from drafter_training.workspace import Workspace

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Train a drafter for a target: data, training, ablations, studies.",
)
app.command(short_help="Let the target answer prompts.")(data)
app.command(short_help="Train on data that are there.")(run)
app.command(short_help="Compare variants, each trained briefly.")(ablate)
app.command(short_help="Choose the tokens to draft from.")(shortlist)
app.command(hidden=True)(score)
app.add_typer(study_app, name="study")


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    target: options.Target = None,
    preset: options.PresetName = "default",
    out: options.Out = None,
    resume: options.Resume = False,
    prompts: options.Prompts = None,
    answer_tokens: options.AnswerTokens = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Train so long instead of the preset's epochs.", show_default=False
        ),
    ] = None,
    init_from: options.InitFrom = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
) -> None:
    """Train a drafter for a target, in one command: its own answers, features, training.

    Everything is kept under --out; after an interruption the same command with --resume goes on
    where it stopped.
    """
    if context.invoked_subcommand is not None:
        return
    if target is None:
        raise typer.BadParameter("a target is needed", param_hint="--target")
    from drafter_training import stages

    with options.reported():
        workspace = _workspace(target, preset, out, threads)
        stages.make(
            workspace,
            resume=resume,
            prompts=prompts or [],
            answer_tokens=answer_tokens or workspace.preset.answer_tokens,
            minutes=minutes,
            init_from=init_from,
            device=device,
            seed=seed,
        )


def _workspace(target: str, preset: str, out: Path | None, threads: int | None) -> Workspace:
    from drafter_training.stages import open_workspace

    return open_workspace(target, preset, out, threads)


def main() -> None:
    """The entry point of ``python -m drafter_training``."""
    try:
        app(prog_name="flashduet train")
    except FlashduetError as error:
        options.fail(error.message)
