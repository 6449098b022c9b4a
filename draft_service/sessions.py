"""Who may draft: open sessions, their epochs and leases, and tombstones of closed ones.

A session belongs to the Propose stream that opened it, and lives until that stream closes it or
ends, or its lease is over. All of this is used by the event loop's thread alone; the engine sees
only how many rows of a session's context are written.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from draft_service.context_pool import HeldContext
from draft_service.messages import Answer, BlockRequest, ChunkArrived
from draft_service.refusals import ChunkRefused, ProposalRefused
from draft_service.scheduler import Ticket
from flashduet.sampling.params import Sampling

# Late chunks of a closed session arrive within seconds; ids are random, so an old tombstone that
# is forgotten turns CLOSED_SESSION into UNKNOWN_SESSION and nothing else.
MAX_TOMBSTONES = 4096


class Owner:
    """Identity of one Propose stream; compared by `is`."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What an Open fixes for a session's life.

    Attributes:
        choice: index among a request's n answers; part of the noise key.
        target_instance_id: the only target whose chunks are taken.
        prompt_length: tokens.
        cache_salt: rows are shared only with sessions of the same salt.
        drafter_only: nothing is copied from the text.
    """

    choice: int
    target_instance_id: bytes
    sampling: Sampling
    prompt_length: int
    cache_salt: str = ""
    drafter_only: bool = False


@dataclass(eq=False, slots=True)
class Proposing:
    """A proposal under way.

    Attributes:
        answer: where its outcome goes.
        timer: ends it when its budget is over.
        context_ns: `time.time_ns()` at which its context was complete; 0 while it is not.
        ticket: its place in the engine's queue, once the context is complete.
    """

    request: BlockRequest
    answer: Answer
    timer: asyncio.TimerHandle
    context_ns: int = 0
    ticket: Ticket | None = None

    @property
    def needed(self) -> int:
        """Rows of context: all before the anchor."""
        return self.request.committed_length - 1


@dataclass(eq=False, slots=True)
class Awaiting:
    """Rows that another session brings, and what has come to follow them.

    Attributes:
        rows: promised.
        end: where the rows that came meanwhile end.
        chunks: those rows, each with its features [rows, width].
    """

    leader: Session
    rows: int
    end: int
    chunks: list[tuple[ChunkArrived, Tensor]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Session:
    """One sequence's state on this replica.

    Attributes:
        context: its rows; `context.end` counts also those that are still on their way through the
            engine, which works in order, so whatever is queued later sees them.
        expires_at: event-loop time, seconds, at which the lease is over.
        proposing: the proposal under way, if any; a newer one replaces it.
        awaiting: the prefix that it was promised, until that can be adopted; the context is empty
            meanwhile, or holds less of it.
    """

    session_id: bytes
    epoch: int
    owner: Owner
    terms: SessionTerms
    context: HeldContext
    expires_at: float
    proposing: Proposing | None = None
    awaiting: Awaiting | None = None

    @property
    def context_end(self) -> int:
        """Rows of context taken in, those promised included: the next chunk begins there."""
        return self.context.end if self.awaiting is None else self.awaiting.end

    def refusal(self, reason: str, detail: str) -> ProposalRefused:
        return ProposalRefused(reason, detail, self.context_end)


class SessionTable:
    """Open sessions by id, and tombstones."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self._open: dict[bytes, Session] = {}
        # id → epoch at which it was closed, oldest first.
        self._closed: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def context_rows(self) -> int:
        """Rows of context held by all sessions."""
        return sum(session.context_end for session in self._open.values())

    def may_open(self, session_id: bytes, epoch: int, owner: Owner) -> Session | None:
        """The session that an Open would replace or repeat, or None if it is new.

        Raises:
            ProposalRefused: WRONG_EPOCH for an epoch that is over, or one that another stream
                holds; TOO_MANY_SESSIONS.
        """
        present = self._open.get(session_id)
        if present is None:
            closed_at = self._closed.get(session_id)
            if closed_at is not None and epoch <= closed_at:
                raise ProposalRefused(
                    "WRONG_EPOCH", f"closed in epoch {closed_at}; open it again with a higher one"
                )
            if len(self._open) >= self.max_sessions:
                raise ProposalRefused(
                    "TOO_MANY_SESSIONS", f"{self.max_sessions} sessions are open here"
                )
        elif epoch < present.epoch or (epoch == present.epoch and owner is not present.owner):
            raise present.refusal("WRONG_EPOCH", f"open in epoch {present.epoch}")
        return present

    def add(self, session: Session) -> None:
        self._closed.pop(session.session_id, None)
        self._open[session.session_id] = session

    def remove(self, session: Session) -> None:
        """Forget the session and leave a tombstone, so that no late chunk brings it back."""
        del self._open[session.session_id]
        self._closed[session.session_id] = session.epoch
        self._closed.move_to_end(session.session_id)
        if len(self._closed) > MAX_TOMBSTONES:
            self._closed.popitem(last=False)

    def owned(self, owner: Owner, session_id: bytes, epoch: int) -> Session:
        """The stream's own session in its present epoch.

        Raises:
            ProposalRefused: UNKNOWN_SESSION or WRONG_EPOCH.
        """
        session = self.peek(owner, session_id)
        if session is None:
            raise ProposalRefused("UNKNOWN_SESSION", "not open on this stream; open it again")
        if session.epoch != epoch:
            raise session.refusal("WRONG_EPOCH", f"open in epoch {session.epoch}")
        return session

    def peek(self, owner: Owner, session_id: bytes) -> Session | None:
        """The stream's own session in whatever epoch, or None."""
        session = self._open.get(session_id)
        return session if session is not None and session.owner is owner else None

    def for_chunk(self, session_id: bytes, epoch: int, target_instance_id: bytes) -> Session:
        """The session that a target's chunk is for.

        Raises:
            ChunkRefused: CLOSED_SESSION, UNKNOWN_SESSION, WRONG_TARGET or WRONG_EPOCH.
        """
        session = self._open.get(session_id)
        if session is None:
            self._no_session(session_id)
        if session.terms.target_instance_id != target_instance_id:
            raise ChunkRefused("WRONG_TARGET", 0)
        if session.epoch != epoch:
            raise ChunkRefused("WRONG_EPOCH", session.context_end)
        return session

    def _no_session(self, session_id: bytes) -> NoReturn:
        known = session_id in self._closed
        raise ChunkRefused("CLOSED_SESSION" if known else "UNKNOWN_SESSION", 0)

    def is_open(self, session: Session) -> bool:
        """Is this very session (not a later one of the same id) open?"""
        return self._open.get(session.session_id) is session

    def all(self) -> list[Session]:
        return list(self._open.values())

    def of_owner(self, owner: Owner) -> list[Session]:
        return [session for session in self._open.values() if session.owner is owner]

    def expired(self, now: float) -> list[Session]:
        return [session for session in self._open.values() if session.expires_at <= now]
