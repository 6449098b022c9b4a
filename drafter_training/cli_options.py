"""Options that several training commands share, and how they report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from flashduet.errors import FlashduetError

err = Console(stderr=True, highlight=False)
INTERRUPTED = 130

Target = Annotated[
    str | None,
    typer.Option(help="default, a folder, a .gguf file, or a Hub id.", show_default=False),
]
PresetName = Annotated[str, typer.Option(help="Recipe: default or smoke.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of data, features and run. Default: in the user's cache, by target.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a run stopped.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSON lines with `turns`; may be repeated. The target makes the other prompts.",
        show_default=False,
    ),
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of answers in all. Default: preset's.", show_default=False),
]
InitFrom = Annotated[
    Path | None,
    typer.Option(
        help="Start from this drafter. Default: from layers of the target.", show_default=False
    ),
]
Device = Annotated[str, typer.Option(help="auto or cpu.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Compute threads. Default: all cores.", show_default=False)
]
Seed = Annotated[int, typer.Option(min=0, help="Of all randomness.")]
CacheGib = Annotated[
    float | None,
    typer.Option(
        min=0, help="Features kept on disk at most, GiB. Default: preset's.", show_default=False
    ),
]
Data = Annotated[
    list[Path], typer.Option(help="Folder that `data` wrote; may be repeated.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with a message."""
    err.print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)
    raise typer.Exit(status)


def note(message: str) -> None:
    """A word about what is going on, dimmed."""
    err.print(Text(message, style="dim"), soft_wrap=True)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors of ours, and values out of their limits, become a message and exit status 1."""
    try:
        yield
    except (FlashduetError, ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def numbers(value: str, option: str, least: int, most: int | None = None) -> list[int]:
    """A comma-separated list of whole numbers within limits, each of them once."""
    limits = f"from {least} to {most}" if most is not None else f"from {least}"
    expected = f"a comma-separated list of whole numbers {limits} expected"
    try:
        found = [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        fail(f"{option}: {value!r} given, {expected}", 2)
    if not found or min(found) < least or (most is not None and max(found) > most):
        fail(f"{option}: {value!r} given, {expected}", 2)
    return list(dict.fromkeys(found))


def temperatures(value: str) -> list[float]:
    """A comma-separated list of temperatures, each of them once."""
    try:
        found = [float(part) for part in value.split(",") if part.strip()]
    except ValueError:
        fail(f"--temperatures: {value!r} is not a comma-separated list of numbers", 2)
    if not found or any(not 0 <= temperature <= 2 for temperature in found):
        fail(f"--temperatures: {value!r} given, numbers from 0 to 2 expected", 2)
    return list(dict.fromkeys(found))
