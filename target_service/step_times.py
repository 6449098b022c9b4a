"""How long a step takes, learnt from the steps made: by its rows, and by what they attend to."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

# A step belongs to the first size that is not below its rows; larger ones to the last.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
# Up to so many positions a row, what a row attends to is not worth telling from the row itself.
_SHORT = 256
# Weight of the newest step in what is predicted.
_NEWEST = 0.2
# A step many times longer than expected was the machine's doing, not its rows'.
_LARGEST_JUMP = 4.0
_REMEMBERED = 256
# No row is free, whatever noise says: of what a row of the largest step took on average.
_LEAST_SLOPE = 0.1


@dataclass(frozen=True, slots=True)
class StepSize:
    """Rows of a step, and the positions that they attend to, summed over the rows."""

    rows: int
    pairs: int = 0

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(self.rows + other.rows, self.pairs + other.pairs)


def part_size(rows: int, context: int) -> StepSize:
    """Of `rows` neighbouring positions that follow `context` others."""
    return StepSize(rows, rows * context + rows * (rows + 1) // 2)


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """Of the steps of one size; mean and p99 of the last 256."""

    max_tokens: int
    steps: int
    mean_s: float
    p99_s: float


class _Size:
    """Steps of about the same rows; `rows` and `seconds` are those of short contexts."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0.0
        self.seconds = 0.0
        self.last: deque[float] = deque(maxlen=_REMEMBERED)
        self._short_steps = 0

    def add_short(self, rows: int, seconds: float) -> None:
        weight = _NEWEST if self._short_steps else 1.0
        usual = min(seconds, _LARGEST_JUMP * self.seconds) if self._short_steps else seconds
        self.seconds += weight * (usual - self.seconds)
        self.rows += weight * (rows - self.rows)
        self._short_steps += 1

    def guess(self, rows: int, seconds: float) -> None:
        """For a size that was seen over long contexts alone."""
        if not self._short_steps:
            self.rows, self.seconds = float(rows), seconds


class StepTimes:
    """Not thread-safe: whoever adds to it also asks it, or holds the same lock."""

    def __init__(self) -> None:
        self._sizes = [_Size() for _ in _SIZES]
        # Those of them that have seen a step, smallest first.
        self._seen: list[_Size] = []
        # Seconds a pair: slope of a line through the origin, over steps of long contexts, each
        # step's weight fading: sums of seconds * pairs and of pairs * pairs.
        self._products = 0.0
        self._squares = 0.0

    def add(self, step: StepSize, seconds: float) -> None:
        """Learn from a step."""
        size = self._sizes[min(bisect_left(_SIZES, step.rows), len(_SIZES) - 1)]
        size.last.append(seconds)
        size.steps += 1
        if step.pairs <= _SHORT * step.rows:
            size.add_short(step.rows, seconds)
        else:
            self._learn_pairs(step, seconds)
            size.guess(step.rows, max(_LEAST_SLOPE * seconds, seconds - self._for_pairs(step)))
        if size.steps == 1:
            self._seen = [size for size in self._sizes if size.steps]

    def predict(self, step: StepSize) -> float | None:
        """Seconds of such a step; None before the first step of all."""
        rows_s = self._for_rows(step.rows)
        return None if rows_s is None else rows_s + self._for_pairs(step)

    def report(self) -> list[SizeTimes]:
        """The sizes seen, smallest first."""
        return [
            SizeTimes(limit, size.steps, sum(size.last) / len(size.last), _p99(size.last))
            for limit, size in zip(_SIZES, self._sizes, strict=True)
            if size.steps
        ]

    def _learn_pairs(self, step: StepSize, seconds: float) -> None:
        rows_s = self._for_rows(step.rows)
        if rows_s is None:
            return
        expected = rows_s + self._for_pairs(step)
        beyond = max(0.0, min(seconds, _LARGEST_JUMP * expected) - rows_s)
        self._products += beyond * step.pairs - _NEWEST * self._products
        self._squares += step.pairs * step.pairs - _NEWEST * self._squares

    def _for_pairs(self, step: StepSize) -> float:
        if step.pairs <= _SHORT * step.rows or not self._squares:
            return 0.0
        return step.pairs * self._products / self._squares

    def _for_rows(self, rows: int) -> float | None:
        """Between two sizes that were seen on the line through both; below the smallest as long as
        that; above the largest on the line from the smallest, or in proportion to the only one."""
        seen = self._seen
        if not seen:
            return None
        below: _Size | None = None
        for size in seen:
            if size.rows >= rows:
                return self._between(below, size, rows)
            below = size
        smallest, largest = seen[0], seen[-1]
        a_row_s = largest.seconds / largest.rows
        if largest.rows > smallest.rows:
            slope = (largest.seconds - smallest.seconds) / (largest.rows - smallest.rows)
            a_row_s = max(slope, _LEAST_SLOPE * a_row_s)
        return largest.seconds + a_row_s * (rows - largest.rows)

    @staticmethod
    def _between(below: _Size | None, above: _Size, rows: int) -> float:
        if below is None or above.rows <= below.rows:
            return above.seconds
        share = (rows - below.rows) / (above.rows - below.rows)
        # A larger step that seems quicker is noise; no step is promised to be.
        return below.seconds + share * max(0.0, above.seconds - below.seconds)


def _p99(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
