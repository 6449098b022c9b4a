"""How long steps take by their size: what GetLoad tells of an engine. No torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from flashduet.v1.common_pb2 import StepTime

# The last steps of each size that mean and p99 are of.
_REMEMBERED = 256
_MOST_TOKENS = 1 << 30


@dataclass(slots=True)
class _Bucket:
    steps: int = 0
    microseconds: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class StepTimesBySize:
    """Step times in buckets by powers of two.

    One thread adds, any other may read: what it sees is at most one step old.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def add(self, tokens: int, nanoseconds: int) -> None:
        """A step of so many tokens took that long."""
        size = 1 << max(0, min(tokens, _MOST_TOKENS) - 1).bit_length()
        bucket = self._buckets.setdefault(size, _Bucket())
        bucket.steps += 1
        bucket.microseconds.append(max(0, nanoseconds) // 1000)

    def to_proto(self) -> list[StepTime]:
        """One entry for each size seen, smallest first."""
        return list(self._entries())

    def _entries(self) -> Iterator[StepTime]:
        for size, bucket in sorted(self._buckets.copy().items()):
            times = sorted(bucket.microseconds.copy())
            if times:
                yield StepTime(
                    max_tokens=size,
                    steps=bucket.steps,
                    mean_us=sum(times) // len(times),
                    p99_us=times[(len(times) * 99 - 1) // 100],
                )
