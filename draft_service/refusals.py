"""Refusals that belong to the protocol: each is answered and counted, and ends nothing else."""

from __future__ import annotations

from collections import Counter

from flashduet.v1.common_pb2 import ReasonCount


class ProposalRefused(Exception):
    """A gateway's message is not followed; `reason` is a RefusalReason without its prefix."""

    def __init__(self, reason: str, detail: str, context_end: int = 0) -> None:
        self.reason, self.detail, self.context_end = reason, detail, context_end
        super().__init__(f"{reason}: {detail}")


class ChunkRefused(Exception):
    """A target's chunk is not taken; `reason` is a NackReason without its prefix.

    `have` is how many rows of context the session holds (0 without a session).
    """

    def __init__(self, reason: str, have: int) -> None:
        self.reason, self.have = reason, have
        super().__init__(f"{reason}: {have} rows held")


class ReasonCounter:
    """How often each reason was given, for GetLoad."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        self._counts[reason] += 1

    def to_proto(self) -> list[ReasonCount]:
        """By reason, alphabetically."""
        return [ReasonCount(reason=r, count=n) for r, n in sorted(self._counts.items())]
