"""Chunks that did not reach a draft, by reason."""

from __future__ import annotations

import threading
from collections import Counter

# Besides the names of NackReason:
RING_FULL = "RING_FULL"
STREAM_LOST = "STREAM_LOST"
SEND_FAILED = "SEND_FAILED"


class DropCounts:
    """Counted in the engine thread and in the event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def by_reason(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
