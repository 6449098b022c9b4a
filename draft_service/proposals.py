"""A proposal from its message to its answer.

It is drafted as soon as its context is there, answered exactly once, and takes no task of its own:
the engine calls back, or a timer ends it.
"""

from __future__ import annotations

import asyncio
import time

from draft_service.context_pool import ContextPool
from draft_service.messages import Answer, BlockDrafted, BlockRequest, Limits
from draft_service.refusals import ProposalRefused
from draft_service.scheduler import Drafted, Scheduler
from draft_service.sessions import Proposing, Session
from draft_service.tracing import record_phases
from draft_service.work import ProposeWork


class Proposals:
    """At most one a session is under way. For the event loop's thread alone.

    Attributes:
        drafted: proposals answered with drafts so far.
    """

    def __init__(self, scheduler: Scheduler, contexts: ContextPool, limits: Limits) -> None:
        self.drafted = 0
        self._scheduler = scheduler
        self._contexts = contexts
        self._limits = limits

    def begin(self, session: Session, request: BlockRequest, answer: Answer) -> None:
        """Draft a block as soon as its context is there; a proposal under way is given up.

        Raises:
            ProposalRefused: BAD_REQUEST; `answer` is not called.
        """
        self._check(session, request)
        self.abandon(session, session.refusal("CONTEXT_LATE", "given up for a later round"))
        timer = asyncio.get_running_loop().call_later(
            request.budget_us / 1e6, self._budget_over, session
        )
        session.proposing = Proposing(request, answer, timer)
        self.context_grew(session)

    def context_grew(self, session: Session) -> None:
        """Hand the proposal that waits, if one does, to the engine once its rows are taken."""
        proposing, context = session.proposing, session.context
        if proposing is None or proposing.ticket is not None or session.awaiting is not None:
            return
        request, needed = proposing.request, proposing.needed
        if context.end < needed:
            return
        if context.end > needed:
            held = f"{needed} rows wanted, {context.end} held"
            self.abandon(session, session.refusal("BEHIND_CONTEXT", held))
            return
        proposing.context_ns = time.time_ns()
        work = ProposeWork(
            context.engine,
            needed,
            request.anchor_token_id,
            request.block_length,
            session.terms.sampling,
            session.terms.choice,
            self._contexts.blocks_for(context, request.block_length),
            session.terms.drafter_only,
        )
        proposing.ticket = self._scheduler.propose(
            work, lambda outcome: self._answer(session, proposing, outcome)
        )

    def abandon(self, session: Session, outcome: ProposalRefused | None) -> None:
        """End the proposal under way, if there is one, with this outcome."""
        proposing, session.proposing = session.proposing, None
        if proposing is None:
            return
        proposing.timer.cancel()
        if proposing.ticket is not None:
            self._scheduler.withdraw(proposing.ticket)
        proposing.answer(outcome)

    def _check(self, session: Session, request: BlockRequest) -> None:
        most = self._limits.max_block_length
        if not 2 <= request.block_length <= most:
            raise session.refusal(
                "BAD_REQUEST", f"block_length {request.block_length} is not from 2 to {most}"
            )
        if request.committed_length < 1:
            raise session.refusal("BAD_REQUEST", "committed_length counts the anchor: 1 at least")
        if request.anchor_token_id >= self._limits.vocab_size:
            raise session.refusal(
                "BAD_REQUEST",
                f"anchor_token_id {request.anchor_token_id} is not below {self._limits.vocab_size}",
            )

    def _answer(
        self, session: Session, proposing: Proposing, outcome: Drafted | BaseException
    ) -> None:
        """The engine is done with the proposal, which has not been abandoned meanwhile."""
        if isinstance(outcome, BaseException):
            result: BlockDrafted | ProposalRefused = session.refusal(
                "INTERNAL", "the drafter failed; see the service's log"
            )
        elif outcome.drafts is None:
            if session.context_end > proposing.needed:
                result = session.refusal("BEHIND_CONTEXT", f"{proposing.needed} rows wanted")
            else:
                result = session.refusal("INTERNAL", "the drafter's logits are no numbers")
        else:
            self.drafted += 1
            arrived_ns, trace = proposing.request.arrived_ns, proposing.request.trace
            result = BlockDrafted(outcome.drafts, arrived_ns, proposing.context_ns, outcome.times)
            record_phases(result, trace)
        proposing.timer.cancel()
        session.proposing = None
        proposing.answer(result)

    def _budget_over(self, session: Session) -> None:
        """The proposal under way has had its time; drafts that come later help nobody."""
        proposing = session.proposing
        if proposing is None:
            return
        if proposing.ticket is not None:
            detail = "the engine was busy for the budget"
        else:
            detail = f"{proposing.needed} rows wanted, {session.context_end} came in time"
        self.abandon(session, session.refusal("CONTEXT_LATE", detail))
