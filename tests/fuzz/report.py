"""What a part of the campaign sent, and how it was answered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MOST_FAILURES_KEPT = 20


@dataclass
class Part:
    """Tallies of one kind of request; `statuses` by the words that the report prints."""

    name: str
    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0

    def count(self, status: str, failure: str | None = None) -> None:
        """One request's end; `failure` says what was wrong with it."""
        self.requests += 1
        self.statuses[status] += 1
        if failure is not None:
            self.fail(failure)

    def fail(self, failure: str) -> None:
        self.failed += 1
        if len(self.failures) < MOST_FAILURES_KEPT:
            self.failures.append(failure)

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


def table(parts: list[Part]) -> str:
    """The report: a line a part, then what failed."""
    lines = [f"{'part':<22} {'requests':>9} {'failed':>7} {'seconds':>8}  statuses"]
    for part in parts:
        statuses = ", ".join(f"{name} {count}" for name, count in part.statuses.most_common())
        lines.append(
            f"{part.name:<22} {part.requests:>9} {part.failed:>7} {part.seconds:>8.1f}  {statuses}"
        )
    lines.append(
        f"{'total':<22} {sum(part.requests for part in parts):>9} "
        f"{sum(part.failed for part in parts):>7} {sum(part.seconds for part in parts):>8.1f}"
    )
    lines += [f"FAILED {part.name}: {failure}" for part in parts for failure in part.failures]
    return "\n".join(lines)
