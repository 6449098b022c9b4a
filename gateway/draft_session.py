"""One answer's session on a draft replica.

Nothing here can fail a request: whatever goes wrong with a draft ends as an empty `Proposal` with
the reason.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashduet.v1 import draft_pb2 as pb
from flashduet.v1.common_pb2 import PhaseTimings

if TYPE_CHECKING:
    from gateway.draft_link import DraftLink

# An open computes nothing: it gets half of the longest time that a proposal may take.
_OPEN_SHARE = 0.5
# The draft answers this much before we stop waiting, so that its own reason still arrives.
_ANSWER_MARGIN = 0.9
# After k refusals in a row a session asks again 2^k rounds later, and at most so much later.
_MOST_SKIPPED_ROUNDS = 64
# After these the draft's context can never fit the session again.
_HOPELESS = {
    pb.REFUSAL_REASON_UNKNOWN_SESSION,
    pb.REFUSAL_REASON_WRONG_EPOCH,
    pb.REFUSAL_REASON_BEHIND_CONTEXT,
    pb.REFUSAL_REASON_UNKNOWN_TARGET,
}


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft that took a session: its instance, and the rows of context that it holds already."""

    instance_id: bytes
    context_hit: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for the positions after the anchor, or none and why.

    The last `copied_tokens` of them are copied from the text. `block_length` is what was asked for;
    `seconds` the time from asking to having it; `more_steps` how many plain steps may follow the
    round at once, since none of them would be drafted either, and `one_by_one` whether each of them
    shall be told as soon as it is made.
    """

    token_ids: list[int]
    undrafted: str = ""
    block_length: int = 1
    seconds: float = 0.0
    timings: PhaseTimings | None = None
    copied_tokens: int = 0
    more_steps: int = 0
    one_by_one: bool = False


class DraftSession:
    """One answer's session on one draft replica, over the stream that was up when it opened."""

    def __init__(self, link: DraftLink, session_id: bytes, opening: pb.ProposeOpen) -> None:
        self._link = link
        self._id = session_id
        self._epoch = 0
        self._opening = opening
        self._round = 0
        self._asked_at = 0.0
        self._answer: asyncio.Future[pb.ProposeResponse | None] | None = None
        self._refusals = 0
        self._refusal = ""
        self._ask_again_at_round = 0
        # The last proposal was copied from the text; the next one probably is.
        self._copies = False
        # Why no more proposals will come; empty while they may.
        self.lost = ""

    async def open(self, traceparent: str) -> OpenedDraft | None:
        """What the target has to know of the draft before it sends features; None: it took none."""
        if not self._link.alive or self._link.stalled:
            self.lost = "draft_stalled" if self._link.alive else "draft_lost"
            return None
        self._link.sessions[self._id] = self
        answer = await self._ask(
            pb.ProposeRequest(traceparent=traceparent, open=self._opening),
            self._link.budget.ceiling_s * _OPEN_SHARE,
        )
        if answer is None:
            self._link.stalled = True
            self.lose(self.lost or "open_late")
        elif answer.HasField("refused"):
            self.lose("open_" + _reason(answer.refused.reason))
        elif answer.opened.context_hit > self._opening.prompt_length:
            self.lose("bad_open")
        if answer is None or self.lost:
            return None
        return OpenedDraft(self._link.info.instance_id, answer.opened.context_hit)

    def unavailable(self, round_: int) -> str:
        """Why no proposal can be asked for in this round; empty when one can."""
        if self.lost:
            return self.lost
        budget = self._link.budget
        if budget.resting and not (budget.trying and self._copies):
            return "resting"
        return self._refusal if round_ < self._ask_again_at_round else ""

    async def propose(
        self, round_: int, committed_length: int, anchor: int, block_length: int, traceparent: str
    ) -> Proposal:
        """Draft tokens for the block after `anchor`, within the replica's budget.

        Args:
            round_: counts the request's rounds from 1, one for which it is not `unavailable`; an
                answer to another round is dropped.
            committed_length: tokens committed, the anchor included.
            anchor: id of the last committed token.
            block_length: anchor + draft tokens wanted, at least 2.
            traceparent: of the span that waits.
        """
        budget = self._link.budget
        tries = budget.asked()
        self._round = round_
        block = pb.ProposeBlock(
            round=round_,
            committed_length=committed_length,
            anchor_token_id=anchor,
            block_length=block_length,
            budget_us=int(budget.seconds * _ANSWER_MARGIN * 1e6),
        )
        answer = await self._ask(
            pb.ProposeRequest(traceparent=traceparent, block=block), budget.seconds
        )
        seconds = time.perf_counter() - self._asked_at
        if answer is None:
            return Proposal([], self._miss(round_))
        if answer.HasField("refused"):
            return Proposal([], self._refused(round_, answer.refused.reason))
        proposal = answer.proposal
        self._copies = _is_copy(proposal)
        if not self._copies:
            budget.hit(seconds)
        elif tries:
            budget.undecided()
        self._refusals = 0
        drafts = list(proposal.token_ids[: block_length - 1])
        own = max(0, len(proposal.token_ids) - proposal.copied_tokens)
        if not self._link.valid(drafts):
            return Proposal([], "bad_proposal")
        return Proposal(
            drafts,
            "" if drafts else "empty_proposal",
            block_length,
            seconds,
            proposal.timings,
            max(0, len(drafts) - own),
        )

    def close(self) -> None:
        """Free the session there; safe at any time, also twice."""
        if self._link.sessions.pop(self._id, None) is not None:
            self._link.send(self._message(pb.ProposeRequest(close=pb.ProposeClose())))

    def lose(self, reason: str) -> None:
        """No more proposals for this session: free it there and let a waiting round go on."""
        self.lost = self.lost or reason
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def heartbeat(self) -> None:
        self._link.send(self._message(pb.ProposeRequest(heartbeat=pb.ProposeHeartbeat())))

    def receive(self, response: pb.ProposeResponse) -> None:
        """Hand an answer to whoever waits for it; late and foreign ones are dropped."""
        kind = response.WhichOneof("message")
        if response.epoch != self._epoch or kind not in ("opened", "proposal", "refused"):
            return
        round_ = 0 if kind == "opened" else getattr(response, kind).round
        if round_ == self._round and self._answer is not None and not self._answer.done():
            self._answer.set_result(response)
        elif kind == "proposal" and round_ == self._round and not _is_copy(response.proposal):
            self._link.budget.late(time.perf_counter() - self._asked_at)

    async def _ask(self, message: pb.ProposeRequest, budget_s: float) -> pb.ProposeResponse | None:
        """The answer, or None when the budget is over or the stream broke."""
        self._asked_at = time.perf_counter()
        self._answer = asyncio.get_running_loop().create_future()
        self._link.send(self._message(message))
        try:
            async with asyncio.timeout(budget_s):
                return await self._answer
        except TimeoutError:
            return None

    def _miss(self, round_: int) -> str:
        if self.lost:
            return self.lost
        self._link.budget.missed()
        self._link.send(self._message(pb.ProposeRequest(cancel=pb.ProposeCancel(round=round_))))
        return "late"

    def _refused(self, round_: int, reason: pb.RefusalReason) -> str:
        self._refusal = _reason(reason)
        if reason in _HOPELESS:
            self.lose(self._refusal)
        else:
            self._refusals += 1
            self._ask_again_at_round = round_ + min(2**self._refusals, _MOST_SKIPPED_ROUNDS)
        return self._refusal

    def _message(self, message: pb.ProposeRequest) -> pb.ProposeRequest:
        message.session_id = self._id
        message.epoch = self._epoch
        return message


def _is_copy(proposal: pb.Proposal) -> bool:
    """No pass of the drafter made it."""
    return 0 < len(proposal.token_ids) <= proposal.copied_tokens


def _reason(reason: pb.RefusalReason) -> str:
    return pb.RefusalReason.Name(reason).removeprefix("REFUSAL_REASON_").lower()
