"""Where the command line writes: answers and JSON to stdout, everything else to stderr."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashduet.errors import FlashduetError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

COLOURS = {"target": "cyan", "draft": "magenta", "gateway": "green"}
INTERRUPTED = 130

# The life of a request, and of a message within a service.
PHASES = ("admit", "prefill", "propose", "verify", "accept")
PARTS = ("queue", "context_wait", "forward", "sample", "publish")

# Without a terminal nothing needs to be cut.
FILE_WIDTH = 400

T = TypeVar("T")


def print_json(value: object) -> None:
    """One JSON object on stdout, on one line, whatever the terminal's width."""
    typer.echo(json.dumps(value))


def wide() -> Console:
    """Where tables and trees go: a terminal as wide as it is, a pipe or a file wide enough."""
    return out if out.is_terminal else Console(width=FILE_WIDTH, highlight=False)


def log_line(service: str, line: str) -> None:
    """A service's line on stderr behind its coloured name; the line itself is left as it is."""
    prefix = Text(f"{service:<7} │ ", style=COLOURS.get(service, "white"))
    err.print(prefix + Text(line), soft_wrap=True)


def note(message: str) -> None:
    """A word about what is going on, dimmed."""
    err.print(Text(message, style="dim"), soft_wrap=True)


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with a message and an exit status (2: it was called wrongly)."""
    err.print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)
    raise typer.Exit(status)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine to its end; SIGINT and SIGTERM cancel it, so that it cleans up.

    Errors of ours become a message and exit status 1; an interruption becomes 130.
    """
    try:
        return asyncio.run(_cancellable(work))
    except FlashduetError as error:
        fail(error.message)
    except (asyncio.CancelledError, KeyboardInterrupt):
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None


async def _cancellable(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not the main thread: whoever runs us there handles signals.
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, task.cancel)
    return await work


def phase_table(phases: Mapping[str, float], seconds: float) -> Table:
    """Where the time went: top-level phases with their parts below, in seconds and percent."""
    table = Table("phase", "seconds", "share", title="where the time went", title_justify="left")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name in _ordered(phases):
        nested = "." in name
        label = f"  {name.partition('.')[2]}" if nested else name
        share = f"{100 * phases[name] / seconds:.1f} %" if seconds > 0 else ""
        table.add_row(label, f"{phases[name]:.3f}", share, style="dim" if nested else None)
    return table


def _ordered(phases: Mapping[str, float]) -> list[str]:
    """In the order in which they happen, each followed by its parts; unknown ones last."""

    def rank(name: str) -> tuple[int, int]:
        top, _, part = name.partition(".")
        return _rank(PHASES, top), _rank(PARTS, part) if part else -1

    return sorted(phases, key=rank)


def _rank(order: tuple[str, ...], name: str) -> int:
    return order.index(name) if name in order else len(order)
