"""How long a step of so many tokens takes, learnt from the steps made."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

# A step belongs to the first size that is not below its tokens; larger ones to the last.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
# Weight of the newest step in what is predicted: a step gets slower as contexts grow.
_NEWEST = 0.2
# A step many times longer than expected was the machine's doing, not its tokens'.
_LARGEST_JUMP = 4.0
_REMEMBERED = 256
# No row is free, whatever noise says: of what a row of the largest step took on average.
_LEAST_SLOPE = 0.1


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """Of the steps of one size; mean and p99 of the last 256."""

    max_tokens: int
    steps: int
    mean_s: float
    p99_s: float


class _Size:
    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0.0
        self.seconds = 0.0
        self.last: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, tokens: int, seconds: float) -> None:
        weight = _NEWEST if self.steps else 1.0
        usual = min(seconds, _LARGEST_JUMP * self.seconds) if self.steps else seconds
        self.seconds += weight * (usual - self.seconds)
        self.tokens += weight * (tokens - self.tokens)
        self.steps += 1
        self.last.append(seconds)


class StepTimes:
    """Not thread-safe: whoever adds to it also asks it, or holds the same lock."""

    def __init__(self) -> None:
        self._sizes = [_Size() for _ in _SIZES]
        # Those of them that have seen a step, smallest first.
        self._seen: list[_Size] = []

    def add(self, tokens: int, seconds: float) -> None:
        """Learn from a step of `tokens` rows."""
        size = self._sizes[min(bisect_left(_SIZES, tokens), len(_SIZES) - 1)]
        size.add(tokens, seconds)
        if size.steps == 1:
            self._seen = [size for size in self._sizes if size.steps]

    def predict(self, tokens: int) -> float | None:
        """Seconds of a step of `tokens` rows; None before the first step of all.

        Between two sizes that were seen on the line through both; below the smallest as long as
        that; above the largest on the line from the smallest, or in proportion to the only one.
        """
        seen = self._seen
        if not seen:
            return None
        below: _Size | None = None
        for size in seen:
            if size.tokens >= tokens:
                return self._between(below, size, tokens)
            below = size
        smallest, largest = seen[0], seen[-1]
        a_row_s = largest.seconds / largest.tokens
        if largest.tokens > smallest.tokens:
            slope = (largest.seconds - smallest.seconds) / (largest.tokens - smallest.tokens)
            a_row_s = max(slope, _LEAST_SLOPE * a_row_s)
        return largest.seconds + a_row_s * (tokens - largest.tokens)

    def report(self) -> list[SizeTimes]:
        """The sizes seen, smallest first."""
        return [
            SizeTimes(limit, size.steps, sum(size.last) / len(size.last), _p99(size.last))
            for limit, size in zip(_SIZES, self._sizes, strict=True)
            if size.steps
        ]

    @staticmethod
    def _between(below: _Size | None, above: _Size, tokens: int) -> float:
        if below is None or above.tokens <= below.tokens:
            return above.seconds
        share = (tokens - below.tokens) / (above.tokens - below.tokens)
        # A larger step that seems quicker is noise; no step is promised to be.
        return below.seconds + share * max(0.0, above.seconds - below.seconds)


def _p99(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
