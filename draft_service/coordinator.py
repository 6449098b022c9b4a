"""What happens to each message: sessions, chunks and proposals brought together.

All methods run on the event loop. A session's rows are owned here from the moment they are taken
(`context_end` counts them) and reach its `ContextKV` through the engine's queue in order. Closing a
session, for whatever reason, goes through `_close` and frees all of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from draft_service.messages import Answer, BlockDrafted, BlockRequest, ChunkArrived, Limits
from draft_service.refusals import ChunkRefused, ProposalRefused, ReasonCounter
from draft_service.scheduler import Drafted, Scheduler
from draft_service.sessions import Owner, Session, SessionTable, SessionTerms
from draft_service.tracing import record_ingest, record_phases
from draft_service.work import IngestWork, ProposeWork, RewindWork
from flashduet.errors import TransportError

log = logging.getLogger(__name__)


class Coordinator:
    """The draft service without its wire."""

    def __init__(self, scheduler: Scheduler, limits: Limits) -> None:
        self.limits = limits
        self.sessions = SessionTable(limits.max_sessions)
        self.refused_chunks = ReasonCounter()
        self.refused_proposals = ReasonCounter()
        self.proposals = 0
        self._scheduler = scheduler
        self._waiting = 0
        self._targets: Counter[bytes] = Counter()
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
    def queued_proposals(self) -> int:
        """Proposals that wait for context or for the engine."""
        return self._waiting + self._scheduler.queued_proposals

    @property
    def targets(self) -> list[bytes]:
        """Instance ids of the targets with an Ingest stream."""
        return sorted(self._targets)

    def attach(self, target_instance_id: bytes) -> None:
        """An Ingest stream of this target begins (a reconnecting target may have two a while)."""
        self._targets[target_instance_id] += 1

    def detach(self, target_instance_id: bytes) -> None:
        self._targets[target_instance_id] -= 1
        if not self._targets[target_instance_id]:
            del self._targets[target_instance_id]

    # ------------------------------------------------------------------ gateway's messages

    def open(self, owner: Owner, session_id: bytes, epoch: int, terms: SessionTerms) -> int:
        """Open, reopen (higher epoch) or repeat (same epoch, same stream) a session.

        Returns:
            Rows of context already held.

        Raises:
            ProposalRefused: WRONG_EPOCH, TOO_MANY_SESSIONS, or UNKNOWN_TARGET for a target that
                has no Ingest stream here, so that no context could come.
        """
        present = self.sessions.may_open(session_id, epoch, owner)
        if terms.target_instance_id not in self._targets:
            raise ProposalRefused("UNKNOWN_TARGET", "that target is not attached to this draft")
        if present is not None and present.epoch == epoch:
            if present.terms != terms:
                raise present.refusal("BAD_REQUEST", "already open in this epoch on other terms")
            self._renew(present)
            return present.context_end
        if present is not None:
            self._close(present)
        session = Session(
            session_id, epoch, owner, terms, self._scheduler.new_context(), expires_at=0.0
        )
        self._renew(session)
        self.sessions.add(session)
        return 0

    def propose(
        self, owner: Owner, session_id: bytes, epoch: int, request: BlockRequest, answer: Answer
    ) -> None:
        """Draft a block as soon as its context is there; `answer` is called with the outcome.

        Raises:
            ProposalRefused: UNKNOWN_SESSION, WRONG_EPOCH or BAD_REQUEST; `answer` is not called.
        """
        session = self.sessions.owned(owner, session_id, epoch)
        self._renew(session)
        self._check(session, request)
        self._abandon(session, session.refusal("CONTEXT_LATE", "given up for a later round"))
        session.round = request.round
        session.answer = answer
        session.proposing = asyncio.create_task(self._draft(session, request, answer))

    def rewind(
        self, owner: Owner, session_id: bytes, epoch: int, length: int, new_epoch: int
    ) -> int:
        """Cut the context back to `length` rows and move the session to `new_epoch`.

        Returns:
            Rows held now: fewer than `length` if there were fewer.

        Raises:
            ProposalRefused: UNKNOWN_SESSION, or WRONG_EPOCH (also where `new_epoch` is no later).
        """
        session = self.sessions.owned(owner, session_id, epoch)
        if new_epoch <= epoch:
            raise session.refusal("WRONG_EPOCH", f"the new epoch must be later than {epoch}")
        self._renew(session)
        self._abandon(session, session.refusal("WRONG_EPOCH", f"rewound to epoch {new_epoch}"))
        session.epoch = new_epoch
        if length < session.context_end:
            self._scheduler.rewind(RewindWork(session.context, length))
            session.move_end(length)
        return session.context_end

    def cancel(self, owner: Owner, session_id: bytes, epoch: int, round: int) -> None:
        """Drop the round's proposal if it is still under way; it is not answered."""
        session = self.sessions.owned(owner, session_id, epoch)
        self._renew(session)
        if session.proposing is not None and session.round == round:
            self._abandon(session, None)

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
        """Take a chunk: copy its bytes out and queue its rows.

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
        if self.sessions.context_rows + chunk.rows > self.limits.max_context_rows:
            raise ChunkRefused("NO_ROOM", held)
        try:
            features = chunk.take()
        except TransportError as error:
            raise ChunkRefused(error.reason, held) from error

        def done(error: BaseException | None) -> None:
            if error is None:
                record_ingest(chunk, time.time_ns())
            elif self.sessions.is_open(session):
                log.error("rows of session %s were lost; it is closed", chunk.session_id.hex())
                self._close(session)

        self._scheduler.ingest(IngestWork(session.context, chunk.base, features), done)
        session.move_end(held + chunk.rows)
        return session.context_end

    # ------------------------------------------------------------------ inside

    def _check(self, session: Session, request: BlockRequest) -> None:
        most = self.limits.max_block_length
        if not 2 <= request.block_length <= most:
            raise session.refusal(
                "BAD_REQUEST", f"block_length {request.block_length} is not from 2 to {most}"
            )
        if request.committed_length < 1:
            raise session.refusal("BAD_REQUEST", "committed_length counts the anchor: 1 at least")
        if request.anchor_token_id >= self.limits.vocab_size:
            raise session.refusal(
                "BAD_REQUEST",
                f"anchor_token_id {request.anchor_token_id} is not below {self.limits.vocab_size}",
            )

    async def _draft(self, session: Session, request: BlockRequest, answer: Answer) -> None:
        try:
            outcome: BlockDrafted | ProposalRefused = await self._drafted(session, request)
        except ProposalRefused as refused:
            outcome = refused
        except Exception:  # whatever it is, the gateway gets its answer
            log.exception("a proposal failed")
            outcome = session.refusal("INTERNAL", "the drafter failed; see the service's log")
        session.proposing = session.answer = None
        answer(outcome)

    async def _drafted(self, session: Session, request: BlockRequest) -> BlockDrafted:
        needed = request.committed_length - 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.budget_us / 1e6
        self._waiting += 1
        try:
            await session.context_reaching(needed, request.budget_us / 1e6)
        finally:
            self._waiting -= 1
        context_ns = time.time_ns()
        work = ProposeWork(
            session.context,
            needed,
            request.anchor_token_id,
            request.block_length,
            session.terms.sampling,
            session.terms.choice,
        )
        try:
            # A proposal that the engine comes to after its budget helps nobody.
            async with asyncio.timeout_at(deadline):
                drafted: Drafted = await self._scheduler.propose(work)
        except TimeoutError:
            raise session.refusal("CONTEXT_LATE", "the engine was busy for the budget") from None
        if drafted.drafts is None:
            if session.context_end > needed:
                raise session.refusal("BEHIND_CONTEXT", f"{needed} rows wanted")
            raise session.refusal("INTERNAL", "the drafter's logits are no numbers")
        self.proposals += 1
        result = BlockDrafted(drafted.drafts, request.arrived_ns, context_ns, drafted.times)
        record_phases(result, request.trace)
        return result

    def _abandon(self, session: Session, outcome: ProposalRefused | None) -> None:
        """End the proposal under way, if there is one, with this outcome."""
        task, answer = session.proposing, session.answer
        session.proposing = session.answer = None
        if task is not None and answer is not None:
            task.cancel()
            answer(outcome)

    def _renew(self, session: Session) -> None:
        session.expires_at = asyncio.get_running_loop().time() + self.limits.lease_s

    def _close(self, session: Session) -> None:
        self._abandon(session, session.refusal("UNKNOWN_SESSION", "closed while drafting"))
        self._scheduler.drop(session.context)
        self.sessions.remove(session)

    async def _expire_leases(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.limits.lease_s / 6))
            for session in self.sessions.expired(loop.time()):
                log.warning("lease of session %s is over; it is freed", session.session_id.hex())
                self._close(session)
