"""The command `flashduet`."""

from __future__ import annotations

from typing import Annotated

import typer

from flashduet import __version__
from flashduet_cli.bench.command import bench_app
from flashduet_cli.check import check_app
from flashduet_cli.doctor import doctor
from flashduet_cli.evaluate import evaluate
from flashduet_cli.generate import generate
from flashduet_cli.models_command import models_app
from flashduet_cli.trace_command import trace_app
from flashduet_cli.train import TRAIN_SETTINGS, train
from flashduet_cli.up import up

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Serve a causal language model faster, without changing one token of its output.",
)
app.command(short_help="Start target, draft and gateway.")(up)
app.command(short_help="Stream an answer.")(generate)
app.command(short_help="Tell what this machine can do.")(doctor)
app.command(context_settings=TRAIN_SETTINGS, add_help_option=False, short_help="Train a drafter.")(
    train
)
app.command(name="eval", short_help="Measure a drafter's acceptance length.")(evaluate)
app.add_typer(models_app, name="models")
app.add_typer(check_app, name="check")
app.add_typer(bench_app, name="bench")
app.add_typer(trace_app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashduet {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve a causal language model faster, without changing one token of its output."""
