"""How long a draft is waited for: measured, never fixed, and forgiving."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_WINDOW = 128
# A budget falls by at most this factor a proposal, so that one quick moment does not make the next
# ordinary one late; it rises at once.
_SLOWEST_FALL = 0.95
# What a missed answer is taken to have needed, as a multiple of the budget it missed.
_MISS_GROWTH = 1.5
_MISSES_BEFORE_REST = 3
_SHORTEST_REST_S = 0.25
_LONGEST_REST_S = 8.0


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """`multiple` of the 99th percentile of recent latencies, within the two bounds (seconds)."""

    multiple: float = 4.0
    floor_s: float = 0.05
    ceiling_s: float = 1.0


class LatencyBudget:
    """The budget of one draft replica's proposals, shared by all sessions on it.

    Before anything is measured the budget is the ceiling. After a few misses in a row the replica
    rests: rounds go on plainly without waiting, and when the rest is over one proposal of one
    session tries again. Rests double while it keeps missing and end with the first answer in time,
    so that neither a slow moment nor a stalled draft decides for good.
    """

    def __init__(self, limits: BudgetLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._latencies: deque[float] = deque(maxlen=_WINDOW)
        self._misses = 0
        self._rest_s = _SHORTEST_REST_S
        self._rests_until = float("-inf")
        # Whether that is the hold while one proposal tries, not a rest.
        self._trying = False
        self.seconds = limits.ceiling_s

    @property
    def ceiling_s(self) -> float:
        """The longest that any proposal is waited for."""
        return self._limits.ceiling_s

    @property
    def resting(self) -> bool:
        return self._clock() < self._rests_until

    @property
    def trying(self) -> bool:
        """It rests only while one proposal tries."""
        return self._trying and self.resting

    def asked(self) -> bool:
        """A proposal is asked for; after a rest, all others wait for how this one goes.

        Returns: whether they do.
        """
        if self._misses < _MISSES_BEFORE_REST or self.resting:
            return False
        self._rests_until = self._clock() + self.seconds
        self._trying = True
        return True

    def hit(self, latency_s: float) -> None:
        """An answer came within the budget."""
        self._misses = 0
        self._rests_until = float("-inf")
        self._rest_s = _SHORTEST_REST_S
        self._trying = False
        self._record(latency_s)

    def undecided(self) -> None:
        """The proposal that tried was answered, but says nothing of what a pass takes: the next one
        tries instead."""
        if self._trying:
            self._rests_until = float("-inf")
            self._trying = False

    def late(self, latency_s: float) -> None:
        """An answer came after its budget; too late to use, not too late to learn from."""
        self._record(latency_s)

    def missed(self) -> None:
        """The budget passed without an answer."""
        self._misses += 1
        self._record(self.seconds * _MISS_GROWTH)
        if self._misses >= _MISSES_BEFORE_REST:
            self._rests_until = self._clock() + self._rest_s
            self._trying = False
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)

    def _record(self, latency_s: float) -> None:
        self._latencies.append(latency_s)
        ordered = sorted(self._latencies)
        wanted = self._limits.multiple * ordered[int(0.99 * (len(ordered) - 1))]
        bounded = min(max(wanted, self._limits.floor_s), self._limits.ceiling_s)
        self.seconds = max(bounded, self.seconds * _SLOWEST_FALL)
