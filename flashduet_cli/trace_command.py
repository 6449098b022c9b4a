"""`flashduet trace`: a request's trace in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from flashduet.errors import FlashduetError
from flashduet_cli.console import COLOURS, fail, note, wide
from flashduet_cli.trace_files import Span, Trace, read_traces

SHOWN_ATTRIBUTES = ("round", "base", "rows", "tokens", "accepted", "transport")
BAR_WIDTH = 16

trace_app = typer.Typer(no_args_is_help=True, help="Look at traces.")


@trace_app.callback()
def trace() -> None:
    """Look at traces."""


@trace_app.command(short_help="Show a request as a tree.")
def show(
    place: Annotated[Path, typer.Argument(help="A trace file, or the folder FLASHDUET_TRACE_DIR.")],
    trace_id: Annotated[
        str | None,
        typer.Option(help="Beginning of a trace's id; default: the last.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds to show; 0 shows all.")] = 4,
) -> None:
    """Show one request as a tree: what took how long, in which process, and when."""
    try:
        traces = read_traces(place)
    except FlashduetError as error:
        fail(error.message)
    chosen = [each for each in traces if each.trace_id.startswith(trace_id or "")]
    if not chosen:
        fail(f"no trace begins with {trace_id}; there are {len(traces)} in {place}")
    if len(chosen) > 1:
        note(f"the last of {len(chosen)} traces")
    wide().print(tree(chosen[-1], rounds or None))


def tree(trace: Trace, rounds: int | None) -> Tree:
    """The trace as a tree; `rounds` bounds how many are shown of each request (None: all)."""
    whole = Tree(Text(f"trace {trace.trace_id}", style="bold"))
    for root in trace.roots:
        _add(whole, trace, root, root, rounds)
    return whole


def _add(parent: Tree, trace: Trace, span: Span, root: Span, rounds: int | None) -> None:
    branch = parent.add(_line(span, root))
    shown = 0
    hidden: list[Span] = []
    for child in trace.children.get(span.span_id, []):
        if child.name == "round" and rounds is not None and shown == rounds:
            hidden.append(child)
            continue
        shown += child.name == "round"
        _add(branch, trace, child, root, rounds)
    if hidden:
        total = sum(child.milliseconds for child in hidden)
        branch.add(Text(f"{len(hidden)} more rounds, {total:.1f} ms", style="dim"))


def _line(span: Span, root: Span) -> Text:
    line = Text(f"{span.name:<18}", style=COLOURS.get(span.service, "white"))
    line.append(f"{span.milliseconds:10.2f} ms  ", style="default")
    line.append(_bar(span, root), style="dim")
    known = [key for key in SHOWN_ATTRIBUTES if key in span.attributes]
    described = "  ".join(f"{key}={span.attributes[key]}" for key in known)
    return line.append(f"  {described}", style="dim")


def _bar(span: Span, root: Span) -> str:
    """Where in its request the span lies."""
    whole = max(1, root.end_ns - root.start_ns)
    start = min(BAR_WIDTH - 1, max(0, (span.start_ns - root.start_ns) * BAR_WIDTH // whole))
    length = max(1, (span.end_ns - span.start_ns) * BAR_WIDTH // whole)
    bar = " " * start + "━" * min(length, BAR_WIDTH - start)
    return bar.ljust(BAR_WIDTH)
