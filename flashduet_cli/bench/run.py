"""Measures the rows one after the other; each is told as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flashduet.errors import FlashduetError
from flashduet_cli.bench.figures import Figure
from flashduet_cli.bench.table import Row
from flashduet_cli.bench.workbench import Workbench

OnFigure = Callable[[Figure], None]


async def measure(bench: Workbench, rows: Sequence[Row], on_figure: OnFigure) -> None:
    """Take every row's figure; a row that fails does not keep the others from being measured."""
    for row in rows:
        await bench.keep_only(row.needs)
        started = time.monotonic()
        measured, error = None, ""
        try:
            measured = await row.measure(bench)
        except (FlashduetError, OSError, TimeoutError) as caught:
            error = getattr(caught, "message", "") or str(caught) or type(caught).__name__
        seconds = time.monotonic() - started
        on_figure(Figure(row.name, row.title, row.bounds, measured, seconds, error))
