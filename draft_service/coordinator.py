"""What happens to each message: sessions, chunks and proposals brought together.

All methods run on the event loop. A session's rows are owned here from the moment they are taken
(`context_end` counts them) and reach the store through the engine's queue in order. Closing a
session, for whatever reason, goes through `_close` and frees all of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draft_service.awaited import AwaitedPrefixes
from draft_service.context_pool import ContextPool
from draft_service.messages import Answer, BlockRequest, ChunkArrived, Limits
from draft_service.proposals import Proposals
from draft_service.refusals import ChunkRefused, ProposalRefused, ReasonCounter
from draft_service.scheduler import Scheduler
from draft_service.sessions import Owner, Session, SessionTable, SessionTerms
from draft_service.tracing import record_ingest
from draft_service.work import RewindWork
from flashduet.errors import InvalidRequest, TransportError
from flashduet.sampling.history import TokenHistory
from flashduet.v1.common_pb2 import StepTime

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attached:
    """A target with an Ingest stream (a reconnecting one may have two a while)."""

    key: bytes
    streams: int = 0


class Coordinator:
    """The draft service without its wire.

    Args:
        identity: of the drafter and the way it keeps rows; part of what prefixes are found by.
    """

    def __init__(
        self, scheduler: Scheduler, contexts: ContextPool, limits: Limits, identity: bytes = b""
    ) -> None:
        self.limits = limits
        self.contexts = contexts
        self.sessions = SessionTable(limits.max_sessions)
        self.refused_chunks = ReasonCounter()
        self.refused_proposals = ReasonCounter()
        self._proposals = Proposals(scheduler, contexts, limits)
        self._awaited = AwaitedPrefixes(self.sessions, contexts)
        self._scheduler = scheduler
        self._identity = identity
        self._targets: dict[bytes, _Attached] = {}
        self._sweeper: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._scheduler.start()
        self._sweeper = asyncio.create_task(self._expire_leases())

    async def stop(self) -> None:
        """Close every session and end the engine's thread."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for session in self.sessions.all():
            self._close(session)
        await self._scheduler.stop()

    @property
    def proposals(self) -> int:
        """Proposals answered with drafts so far."""
        return self._proposals.drafted

    @property
    def queued_proposals(self) -> int:
        """Proposals that wait for context or for the engine."""
        waiting = sum(
            session.proposing is not None and session.proposing.ticket is None
            for session in self.sessions.all()
        )
        return waiting + self._scheduler.queued_proposals

    @property
    def targets(self) -> list[bytes]:
        """Instance ids of the targets with an Ingest stream."""
        return sorted(self._targets)

    @property
    def step_times(self) -> list[StepTime]:
        """How long the engine's steps took by their rows."""
        return self._scheduler.step_times.to_proto()

    def attach(self, target_instance_id: bytes, key: bytes = b"") -> None:
        """An Ingest stream of this target begins; `key` says what computes its features."""
        attached = self._targets.setdefault(target_instance_id, _Attached(key))
        attached.key = key
        attached.streams += 1

    def detach(self, target_instance_id: bytes) -> None:
        attached = self._targets[target_instance_id]
        attached.streams -= 1
        if not attached.streams:
            del self._targets[target_instance_id]

    # ------------------------------------------------------------------ gateway's messages

    def open(
        self,
        owner: Owner,
        session_id: bytes,
        epoch: int,
        terms: SessionTerms,
        token_ids: Sequence[int] = (),
    ) -> int:
        """Open, reopen (higher epoch) or repeat (same epoch, same stream) a session.

        Args:
            token_ids: of the sequence so far, by which context that is still held is found.

        Returns:
            Rows of context already held.

        Raises:
            ProposalRefused: WRONG_EPOCH, TOO_MANY_SESSIONS, BAD_REQUEST, or UNKNOWN_TARGET for a
                target that has no Ingest stream here, so that no context could come.
        """
        present = self.sessions.may_open(session_id, epoch, owner)
        target = self._targets.get(terms.target_instance_id)
        if target is None:
            raise ProposalRefused("UNKNOWN_TARGET", "that target is not attached to this draft")
        if present is not None and present.epoch == epoch:
            if present.terms != terms:
                raise present.refusal("BAD_REQUEST", "already open in this epoch on other terms")
            self._renew(present)
            return present.context_end
        try:
            terms.sampling.check_vocabulary(self.limits.vocab_size)
        except InvalidRequest as error:
            raise ProposalRefused("BAD_REQUEST", error.message) from error
        if token_ids and (highest := max(token_ids)) >= self.limits.vocab_size:
            raise ProposalRefused(
                "BAD_REQUEST", f"token_ids: {highest} is not below {self.limits.vocab_size}"
            )
        if present is not None:
            self._close(present)
        key = b"|".join((self._identity, target.key, terms.cache_salt.encode()))
        history = TokenHistory(terms.prompt_length) if terms.sampling.needs_history else None
        context = self.contexts.open(key, token_ids, history)
        session = Session(session_id, epoch, owner, terms, context, expires_at=0.0)
        self._renew(session)
        self.sessions.add(session)
        self._awaited.promise(session)
        return session.context_end

    def propose(
        self, owner: Owner, session_id: bytes, epoch: int, request: BlockRequest, answer: Answer
    ) -> None:
        """Draft a block as soon as its context is there; `answer` is called with the outcome.

        Raises:
            ProposalRefused: UNKNOWN_SESSION, WRONG_EPOCH or BAD_REQUEST; `answer` is not called.
        """
        session = self.sessions.owned(owner, session_id, epoch)
        self._renew(session)
        self._proposals.begin(session, request, answer)

    def rewind(
        self, owner: Owner, session_id: bytes, epoch: int, length: int, new_epoch: int
    ) -> int:
        """Cut the context back to `length` rows and move the session to `new_epoch`.

        Returns:
            Rows held now: fewer than `length` if there were fewer, or if the cut would have gone
            through a block that other sessions share.

        Raises:
            ProposalRefused: UNKNOWN_SESSION, or WRONG_EPOCH (also where `new_epoch` is no later).
        """
        session = self.sessions.owned(owner, session_id, epoch)
        if new_epoch <= epoch:
            raise session.refusal("WRONG_EPOCH", f"the new epoch must be later than {epoch}")
        self._renew(session)
        self._proposals.abandon(
            session, session.refusal("WRONG_EPOCH", f"rewound to epoch {new_epoch}")
        )
        session.epoch = new_epoch
        if session.awaiting is not None:
            session.awaiting = None
            self.contexts.adopt(session.context, length)
        if length < session.context_end:
            end = self.contexts.rewind(session.context, length)
            self._scheduler.rewind(RewindWork(session.context.engine, end))
        self._settle_followers(session)
        return session.context_end

    def cancel(self, owner: Owner, session_id: bytes, epoch: int, round: int) -> None:
        """Drop the round's proposal if it is still under way; it is not answered."""
        session = self.sessions.owned(owner, session_id, epoch)
        self._renew(session)
        if session.proposing is not None and session.proposing.request.round == round:
            self._proposals.abandon(session, None)

    def heartbeat(self, owner: Owner, session_id: bytes, epoch: int) -> None:
        """Renew the lease.

        Raises:
            ProposalRefused: UNKNOWN_SESSION, WRONG_EPOCH.
        """
        self._renew(self.sessions.owned(owner, session_id, epoch))

    def close(self, owner: Owner, session_id: bytes, epoch: int) -> None:
        """Free the session; closing one that is not there, or was reopened since, does nothing."""
        session = self.sessions.peek(owner, session_id)
        if session is not None and session.epoch <= epoch:
            self._close(session)

    def close_owner(self, owner: Owner) -> None:
        """A Propose stream has ended: free what it opened."""
        for session in self.sessions.of_owner(owner):
            self._close(session)

    # ------------------------------------------------------------------ target's messages

    def ingest(self, chunk: ChunkArrived) -> int:
        """Take a chunk and queue its rows.

        Returns:
            Rows of context now held, those on their way through the engine included.

        Raises:
            ChunkRefused: the chunk was not taken and nothing has changed.
        """
        session = self.sessions.for_chunk(chunk.session_id, chunk.epoch, chunk.target_instance_id)
        held = session.context_end
        if chunk.base != held:
            raise ChunkRefused("GAP", held)
        if chunk.rows < 1:
            raise ChunkRefused("WRONG_SHAPE", held)
        if max(chunk.token_ids) >= self.limits.vocab_size:
            raise ChunkRefused("OUT_OF_RANGE", held)
        if session.awaiting is not None:
            if self.contexts.free_rows < held + chunk.rows - session.awaiting.rows:
                raise ChunkRefused("NO_ROOM", held)
        elif not self.contexts.has_room(session.context, chunk.rows):
            raise ChunkRefused("NO_ROOM", held)
        try:
            features = chunk.take()
        except TransportError as error:
            raise ChunkRefused(error.reason, held) from error

        if session.awaiting is not None:
            session.awaiting.chunks.append((chunk, features))
            session.awaiting.end += chunk.rows
        else:
            self._queue(session, chunk, features)
            self._proposals.context_grew(session)
        return session.context_end

    # ------------------------------------------------------------------ inside

    def _settle_followers(self, leader: Session) -> None:
        """Its rows are written, or will not come: see to the sessions that wait for them."""
        for session in self._awaited.followers(leader):
            assert session.awaiting is not None
            chunks, end = session.awaiting.chunks, session.awaiting.rows
            if not self._awaited.settle(session):
                continue
            if session.context_end < end:
                log.warning("session %s misses a promised prefix", session.session_id.hex())
                continue
            for chunk, features in chunks:
                if not self.contexts.has_room(session.context, chunk.rows):
                    log.warning("session %s: no room for its rows", session.session_id.hex())
                    break
                self._queue(session, chunk, features)
            self._proposals.context_grew(session)

    def _queue(self, session: Session, chunk: ChunkArrived, features: Tensor) -> None:
        """Rows for which there is room go to the engine."""
        context, epoch = session.context, session.epoch

        def done(error: BaseException | None) -> None:
            if error is not None or not chunk.intact():
                if self.sessions.is_open(session):
                    log.error("rows of session %s were lost; it is closed", chunk.session_id.hex())
                    self._close(session)
                return
            record_ingest(chunk, time.time_ns())
            # A rewind has other rows in their place, or will have.
            if self.sessions.is_open(session) and session.epoch == epoch:
                self.contexts.written(context, work.end)
                self._settle_followers(session)

        work = self.contexts.take(context, chunk.token_ids, features)
        self._scheduler.ingest(work, done)

    def _renew(self, session: Session) -> None:
        session.expires_at = asyncio.get_running_loop().time() + self.limits.lease_s

    def _close(self, session: Session) -> None:
        self._proposals.abandon(
            session, session.refusal("UNKNOWN_SESSION", "closed while drafting")
        )
        self._scheduler.drop(session.context.engine)
        self.contexts.close(session.context)
        self.sessions.remove(session)
        self._settle_followers(session)

    async def _expire_leases(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.limits.lease_s / 6))
            for session in self.sessions.expired(loop.time()):
                log.warning("lease of session %s is over; it is freed", session.session_id.hex())
                self._close(session)
