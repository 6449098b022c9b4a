"""A picture of the table: each figure against its floor and goal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from flashduet.errors import ConfigurationError
from flashduet_cli.bench.figures import Figure
from flashduet_cli.bench.report import BenchReport

_COLOURS = {"goal": "#2e7d32", "floor": "#66a96a", "missed": "#c62828", "reported": "#1565c0"}
# Figures that beat their floor by more than this are drawn at the edge.
_EDGE = 4.0


def plot(report: BenchReport, file: Path) -> None:
    """Draw the rows that have a floor or a goal and a value above 0, best to the right.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn = [figure for figure in report.figures if _bound(figure) is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.45 * max(1, len(drawn))))
    for line, row in enumerate(drawn):
        _draw(axes, line, row)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(drawn)), [row.title for row in drawn], fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / _EDGE, _EDGE)
    axes.set_xlabel("times as good as the floor (line: 95% interval, diamond: goal)")
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {file}: {error}") from error
    finally:
        pyplot.close(figure)


def _bound(row: Figure) -> float | None:
    """What the row is drawn against; None where it cannot be."""
    bound = row.bounds.floor if row.bounds.floor is not None else row.bounds.goal
    drawable = row.measured is not None and row.measured.estimate.value > 0 and bound
    return bound if drawable else None


def _draw(axes: Any, line: int, row: Figure) -> None:
    bound = _bound(row)
    assert bound is not None
    assert row.measured is not None

    def place(value: float) -> float:
        better = bound / value if row.bounds.most else value / bound
        return min(_EDGE, max(1 / _EDGE, better))

    estimate = row.measured.estimate
    value = place(estimate.value)
    colour = _COLOURS.get(row.verdict, "#555555")
    axes.barh(line, math.log2(value) and value - 1.0, left=1.0, height=0.5, color=colour)
    if estimate.low is not None and estimate.high is not None:
        ends = [place(max(end, 1e-9)) for end in (estimate.low, estimate.high)]
        axes.plot(ends, [line, line], color="black", linewidth=1.5)
    if row.bounds.goal:
        axes.plot(place(row.bounds.goal), line, marker="D", color="black", markersize=5)
    axes.text(_EDGE, line, f" {row.bounds.show(estimate.value)}", va="center", fontsize=8)
