"""A prefill or a round on its way through the engine: what to compute next, and its outcome."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from target_service.session import (
    ContextRows,
    Interval,
    PrefillChunk,
    Session,
    StepResult,
    VerifyBlock,
    WorkItem,
)

PhaseName = Literal["queue", "forward", "sample", "publish"]


class FeatureFeed(Protocol):
    """Where a session's features go; used in the engine thread."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers wanted, in order; empty once nothing is wanted any more."""

    def publish(self, rows: ContextRows, traceparent: str) -> None:
        """Hand rows over without waiting; failing to is the feed's own matter."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a message's time in the service."""

    name: PhaseName
    interval: Interval
    # Rows computed, chosen or sent.
    rows: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a prefill or a round came to.

    Attributes:
        committed: the first token, or the accepted drafts and the bonus.
        accepted: draft tokens agreed with.
        chunks: steps that it took.
        phases: in order of time.
    """

    committed: tuple[int, ...]
    accepted: int
    chunks: int
    phases: tuple[Phase, ...]


class Job(ABC):
    """Made in the event loop, advanced in the engine thread, its future set in the loop again."""

    def __init__(self, session: Session, feed: FeatureFeed | None, traceparent: str) -> None:
        self.session = session
        self.feed = feed
        self.traceparent = traceparent
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        # Set when nobody waits for the outcome any more; the job is then dropped between steps.
        self.abandoned = False
        self._phases: list[Phase] = []
        self._chunks = 0
        self._arrived_ns, self._arrived_clock = time.time_ns(), time.perf_counter_ns()

    @abstractmethod
    def next_item(self) -> WorkItem:
        """The work that the next step is to do."""

    @abstractmethod
    def absorb(self, result: StepResult) -> Outcome | None:
        """Take a step's result; the outcome once there is no more to do."""

    def started(self) -> None:
        """The job leaves the queue for the first time, or again."""
        if not self._phases:
            waited = time.perf_counter_ns() - self._arrived_clock
            self._phases.append(Phase("queue", Interval(self._arrived_ns, waited), 0))

    def add_phase(self, name: PhaseName, interval: Interval, rows: int) -> None:
        self._phases.append(Phase(name, interval, rows))

    def _layer_ids(self) -> tuple[int, ...]:
        return self.feed.layer_ids if self.feed is not None else ()

    def _outcome(self, result: StepResult) -> Outcome:
        return Outcome(result.committed, result.accepted, self._chunks, tuple(self._phases))


class PrefillJob(Job):
    """Computes all of a session's tokens, `chunk_tokens` a step, and chooses the one after them."""

    def __init__(
        self, session: Session, feed: FeatureFeed | None, traceparent: str, chunk_tokens: int
    ) -> None:
        super().__init__(session, feed, traceparent)
        self._tokens = tuple(session.token_ids)
        self._chunk_tokens = chunk_tokens
        self._base = 0

    def next_item(self) -> PrefillChunk:
        end = min(self._base + self._chunk_tokens, len(self._tokens))
        last = end == len(self._tokens)
        ids = self._tokens[self._base : end]
        return PrefillChunk(self.session, ids, self._base, last, self._layer_ids())

    def absorb(self, result: StepResult) -> Outcome | None:
        self._chunks += 1
        self._base += self._chunk_tokens
        return self._outcome(result) if result.committed else None


class RoundJob(Job):
    """Verifies one block."""

    def __init__(
        self,
        session: Session,
        feed: FeatureFeed | None,
        traceparent: str,
        base: int,
        token_ids: Sequence[int],
    ) -> None:
        super().__init__(session, feed, traceparent)
        self._base = base
        self._token_ids = tuple(token_ids)

    def next_item(self) -> VerifyBlock:
        return VerifyBlock(self.session, self._base, self._token_ids, self._layer_ids())

    def absorb(self, result: StepResult) -> Outcome | None:
        self._chunks += 1
        return self._outcome(result)
