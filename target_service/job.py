"""A prefill or a round on its way through the engine: what to compute next, and its outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from flashduet.errors import FlashduetError
from flashduet.sampling import PositionLogprobs
from target_service.session import (
    ContextRows,
    Interval,
    PrefillChunk,
    Session,
    StepFailure,
    StepResult,
    VerifyBlock,
    WorkItem,
)

log = logging.getLogger(__name__)

PhaseName = Literal["queue", "forward", "sample"]


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
        cached_tokens: leading tokens whose keys and values were found.
        logprobs: of each committed token; empty unless the session asked for them.
        phases: in order of time.
        published_ns: spent on handing features over since the session's answer before.
    """

    committed: tuple[int, ...]
    accepted: int
    chunks: int
    cached_tokens: int
    logprobs: tuple[PositionLogprobs, ...]
    phases: tuple[Phase, ...]
    published_ns: int


class Job(ABC):
    """Made in the event loop, advanced in the engine thread, its future set in the loop again."""

    def __init__(self, session: Session, feed: FeatureFeed | None, traceparent: str) -> None:
        self.session = session
        self.feed = feed
        self.traceparent = traceparent
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        # Leading tokens that its first chunk found computed.
        self.cached_tokens = 0
        self._phases: list[Phase] = []
        self._chunks = 0
        self.arrive()

    def arrive(self) -> None:
        """It begins to wait for its turn."""
        self._arrived_ns, self._arrived_clock = time.time_ns(), time.perf_counter_ns()

    @property
    @abstractmethod
    def missing(self) -> int:
        """Positions to compute in chunks before, or until, the job's answer."""

    @abstractmethod
    def next_item(self, count: int) -> WorkItem:
        """The next `count` rows of work, at most `missing` of them where any are."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers whose states the job's draft still wants."""
        return self.feed.layer_ids if self.feed is not None else ()

    def follower(self, outcome: Outcome) -> Job | None:
        """The job that comes next without being asked for, now that this one has ended."""
        return None

    def started(self) -> None:
        """The job leaves the queue for the first time, or again."""
        if not self._phases:
            waited = time.perf_counter_ns() - self._arrived_clock
            self._phases.append(Phase("queue", Interval(self._arrived_ns, waited), 0))

    def absorb(
        self, result: StepResult | StepFailure, published_ns: int
    ) -> Outcome | Exception | None:
        """Take a step's result; how the job ends, once there is no more to do."""
        if isinstance(result, StepFailure):
            return self._failure(result.error)
        self._chunks += 1
        self._phases.append(Phase("forward", result.forward, result.rows))
        if not result.committed:
            return None
        self._phases.append(Phase("sample", result.sample, len(result.committed)))
        return Outcome(
            committed=result.committed,
            accepted=result.accepted,
            chunks=self._chunks,
            cached_tokens=self.cached_tokens,
            logprobs=result.logprobs,
            phases=tuple(self._phases),
            published_ns=published_ns,
        )

    def _failure(self, error: Exception) -> Exception:
        """What the caller is told; our own mistakes go to the log alone."""
        if isinstance(error, FlashduetError):
            return error
        log.error("session %s failed", self.session.session_id.hex(), exc_info=error)
        return FlashduetError(f"the target engine failed: {type(error).__name__}")

    def _chunk(self, count: int, end: int) -> PrefillChunk:
        """Committed tokens from where the table ends; the token after them when they reach `end`.

        Features that were sent before a preemption, or that the draft had, are not made again.
        """
        session = self.session
        base = session.table.length
        stop = base + count
        layer_ids = self.layer_ids if stop > session.draft_context_hit else ()
        return PrefillChunk(session, session.token_ids[base:stop], base, stop == end, layer_ids)


class PrefillJob(Job):
    """Computes all of a session's tokens and chooses the one after them."""

    @property
    def missing(self) -> int:
        return self.session.committed_length - self.session.table.length

    def next_item(self, count: int) -> PrefillChunk:
        return self._chunk(count, self.session.committed_length)


class RoundJob(Job):
    """Verifies one block, after computing again what a preemption took.

    With `then` another round follows at once, unless this one ends with a stop id.
    """

    def __init__(
        self,
        session: Session,
        feed: FeatureFeed | None,
        traceparent: str,
        base: int,
        token_ids: Sequence[int],
        then: PlainJob | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(session, feed, traceparent)
        self._base = base
        self._token_ids = tuple(token_ids)
        self._then = then
        self._stop_ids = stop_ids

    def follower(self, outcome: Outcome) -> PlainJob | None:
        if self._then is None or outcome.committed[-1] in self._stop_ids:
            return None
        self._then.arrive()
        return self._then

    @property
    def missing(self) -> int:
        return self._base - self.session.table.length

    @property
    def rows(self) -> int:
        """The anchor and the draft tokens."""
        return 1 + len(self._token_ids)

    def next_item(self, count: int) -> WorkItem:
        if self.missing:
            # No token is chosen at the end: the anchor that follows is known.
            return self._chunk(count, end=-1)
        return VerifyBlock(self.session, self._base, self._token_ids, self.layer_ids)


class PlainJob(RoundJob):
    """A plain step after another round, whose tokens its base depends on."""

    def __init__(
        self,
        session: Session,
        feed: FeatureFeed | None,
        traceparent: str,
        then: PlainJob | None,
        stop_ids: frozenset[int],
    ) -> None:
        super().__init__(session, feed, traceparent, 0, (), then, stop_ids)

    def arrive(self) -> None:
        super().arrive()
        self._base = self.session.anchor_position
