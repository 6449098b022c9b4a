"""How one answer is drafted: its draft session, its block-length controller, and why not."""

from __future__ import annotations

from flashduet.v1.target_pb2 import DecodeOpened, DecodeVerified
from gateway.answer import Answer
from gateway.controller import BlockController
from gateway.draft_session import DraftSession, OpenedDraft, Proposal
from gateway.tally import Phase, Tally

# Plain steps that the target makes one after the other without hearing from us. What is made beyond
# a stop string is lost, some two of them: it ends with the message that closes the session.
_STEPS_AHEAD = 32


class Drafter:
    """Gives each round a proposal; an empty one is as good as any, only slower.

    Without a session (`undrafted` says why) every proposal is empty.
    """

    def __init__(
        self,
        session: DraftSession | None,
        controller: BlockController | None,
        tally: Tally,
        undrafted: str,
        steps_at_once: int = 1,
    ) -> None:
        """`steps_at_once`: plain steps that the client does not mind to hear of together."""
        self._steps_at_once = steps_at_once
        self._session = session
        self._controller = controller
        self._tally = tally
        self._undrafted = undrafted

    async def open(self, traceparent: str) -> OpenedDraft | None:
        """The draft that took the session and wants its features, if one did."""
        return await self._session.open(traceparent) if self._session is not None else None

    def opened(self, opened: DecodeOpened) -> None:
        """The prompt is prefilled; the target may have been unable to reach the draft."""
        if self._session is not None and not opened.drafting:
            self._session.lose("no_context")

    async def propose(self, answer: Answer, round_: Phase) -> Proposal:
        """Draft tokens for the coming round; none, with the reason, where there can be none."""
        session, controller = self._session, self._controller
        if session is None or controller is None:
            return self._never(self._undrafted, answer)
        if session.lost:
            return self._never(session.lost, answer)
        if answer.wanted == 1:
            return Proposal([], "last_token")
        number = self._tally.rounds + 1
        if reason := session.unavailable(number):
            return Proposal([], reason)
        block_length = min(controller.length(), answer.wanted)
        if block_length == 1:
            return Proposal([], "controller")
        with round_.phase("propose") as phase:
            proposal = await session.propose(
                number, answer.length, answer.anchor, block_length, phase.traceparent
            )
            phase.note(
                round=number,
                base=answer.length - 1,
                tokens=len(proposal.token_ids),
                copied_tokens=proposal.copied_tokens,
                undrafted=proposal.undrafted,
            )
        if proposal.timings is not None:
            self._tally.draft_spent(proposal.timings)
        return proposal

    def _never(self, reason: str, answer: Answer) -> Proposal:
        """Nothing now nor later."""
        one_by_one = self._steps_at_once == 1
        steps = _STEPS_AHEAD if one_by_one else self._steps_at_once
        more_steps = min(steps, answer.wanted) - 1
        return Proposal([], reason, more_steps=more_steps, one_by_one=one_by_one)

    def learn(self, proposal: Proposal, verified: DecodeVerified, verify_s: float) -> None:
        """Take the target's verdict into account."""
        session, controller = self._session, self._controller
        if session is None or controller is None:
            return
        if not verified.drafting:
            session.lose("context_lost")
        drafted = len(proposal.token_ids)
        if drafted:
            controller.observe(
                proposal.block_length,
                drafted,
                verified.accepted,
                proposal.seconds,
                verify_s,
                proposal.copied_tokens,
            )
        else:
            controller.observe_plain(verify_s / (1 + len(verified.more_token_ids)))

    def close(self) -> None:
        """Free the draft's session; safe at any time."""
        if self._session is not None:
            self._session.close()
