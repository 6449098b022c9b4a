"""What a row of the table promises, and what was measured for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flashduet_cli.bench.statistics import Estimate

Verdict = Literal["goal", "floor", "missed", "reported", "failed"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What counts as enough: a floor, which has to be reached, and a goal.

    Attributes:
        floor: None where the figure is only reported.
        goal: at least as demanding.
        most: figures must not exceed the bounds; otherwise they must reach them.
        unit: "x" for ratios, "%" for shares (given as fractions), "s", or "" for counts.
    """

    floor: float | None
    goal: float | None
    most: bool
    unit: Literal["x", "%", "s", ""]

    def verdict(self, value: float) -> Verdict:
        if self.goal is not None and self._reached(value, self.goal):
            return "goal"
        if self.floor is None:
            return "reported"
        return "floor" if self._reached(value, self.floor) else "missed"

    def show(self, value: float | None) -> str:
        """A value of this kind in words of the table."""
        if value is None:
            return ""
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        if self.unit == "s":
            return f"{value:.1f} s"
        return f"{value:g}" if self.unit == "" else f"{value:.2f}"

    def show_bound(self, bound: float | None) -> str:
        if bound is None:
            return ""
        sign = "≤" if self.most else "≥"
        shown = f"{100 * bound:g} %" if self.unit == "%" else f"{bound:g}"
        return f"{sign} {shown}{' s' if self.unit == 's' else ''}"

    def _reached(self, value: float, bound: float) -> bool:
        return value <= bound if self.most else value >= bound


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row's measurement gives.

    Attributes:
        estimate: the figure.
        samples: what it was made of, in the order in which they were taken.
        details: whatever helps to understand it, ready for JSON.
    """

    estimate: Estimate
    samples: Sequence[float] = ()
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `error` says why there is no figure."""

    row: str
    title: str
    bounds: Bounds
    measured: Measured | None
    seconds: float
    error: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.measured is None:
            return "failed"
        return self.bounds.verdict(self.measured.estimate.value)

    def as_dict(self) -> dict[str, object]:
        """The object that --json prints for it."""
        measured = self.measured
        return {
            "row": self.row,
            "title": self.title,
            "value": measured.estimate.value if measured else None,
            "low": measured.estimate.low if measured else None,
            "high": measured.estimate.high if measured else None,
            "unit": self.bounds.unit,
            "better": "lower" if self.bounds.most else "higher",
            "floor": self.bounds.floor,
            "goal": self.bounds.goal,
            "verdict": self.verdict,
            "samples": list(measured.samples) if measured else [],
            "details": dict(measured.details) if measured else {},
            "seconds": round(self.seconds, 1),
            **({"error": self.error} if self.error else {}),
        }
