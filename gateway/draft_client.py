"""The gateway's side of a draft replica: one long-lived Propose stream for all its sessions.

Nothing here can fail a request: whatever goes wrong with a draft ends as an empty `Proposal` with
the reason. Messages are queued without waiting, so that a session can be closed from any cleanup.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio

from flashduet import rpc
from flashduet.sampling.params import Sampling
from flashduet.v1 import draft_pb2 as pb
from flashduet.v1.common_pb2 import PhaseTimings
from flashduet.v1.draft_pb2_grpc import DraftServiceStub
from gateway.budget import BudgetLimits, LatencyBudget
from gateway.health import Health, ask_health

logger = logging.getLogger(__name__)

SERVICE = "flashduet.v1.DraftService"
_UNARY_TIMEOUT_S = 2.0
_OPEN_BUDGET_S = 0.5
# A draft that leaves so many messages unread is gone for our purposes.
_MOST_UNSENT = 4096
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
class Proposal:
    """Draft tokens for the positions after the anchor, or none and why.

    `block_length` is what was asked for; `seconds` the time from asking to having it.
    """

    token_ids: list[int]
    undrafted: str = ""
    block_length: int = 1
    seconds: float = 0.0
    timings: PhaseTimings | None = None


class DraftSession:
    """One request's session on one draft replica, over the stream that was up when it opened."""

    def __init__(self, link: _Link, session_id: bytes, opening: pb.ProposeOpen) -> None:
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
        # Why no more proposals will come; empty while they may.
        self.lost = ""

    @property
    def instance_id(self) -> bytes:
        return self._link.info.instance_id

    async def open(self, traceparent: str) -> bool:
        """Whether the draft took the session; it must have before the target sends features."""
        if not self._link.alive or self._link.stalled:
            self.lost = "draft_stalled" if self._link.alive else "draft_lost"
            return False
        self._link.sessions[self._id] = self
        answer = await self._ask(
            pb.ProposeRequest(traceparent=traceparent, open=self._opening), _OPEN_BUDGET_S
        )
        if answer is None:
            self._link.stalled = True
            self.lose(self.lost or "open_late")
        elif answer.HasField("refused"):
            self.lose("open_" + _reason(answer.refused.reason))
        return not self.lost

    def unavailable(self, round_: int) -> str:
        """Why no proposal can be asked for in this round; empty when one can."""
        if self.lost:
            return self.lost
        if self._link.budget.resting:
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
        budget.hit(seconds)
        self._refusals = 0
        proposal = answer.proposal
        drafts = list(proposal.token_ids[: block_length - 1])
        if not self._link.valid(drafts):
            return Proposal([], "bad_proposal")
        return Proposal(
            drafts, "" if drafts else "empty_proposal", block_length, seconds, proposal.timings
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
        elif kind == "proposal" and round_ == self._round:
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


class _Outgoing:
    """The queue as grpc.aio reads it. (A generator would be closed while it waits.)"""

    def __init__(self, queue: asyncio.Queue[pb.ProposeRequest]) -> None:
        self._queue = queue

    def __aiter__(self) -> AsyncIterator[pb.ProposeRequest]:
        return self

    async def __anext__(self) -> pb.ProposeRequest:
        return await self._queue.get()


class _Link:
    """One Propose stream while it is up, and the sessions opened over it."""

    def __init__(self, info: pb.DraftServiceGetModelInfoResponse, budget: LatencyBudget) -> None:
        self.info = info
        self.budget = budget
        self.alive = True
        # An opening got no answer in time: no more of them until the draft says anything again.
        self.stalled = False
        self.sessions: dict[bytes, DraftSession] = {}
        self._vocab_size = info.target_facts.vocab_size
        self._unsent: asyncio.Queue[pb.ProposeRequest] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall | None = None

    def send(self, message: pb.ProposeRequest) -> None:
        """Queue a message; a draft that reads none of them is cut off."""
        self._unsent.put_nowait(message)
        if self._unsent.qsize() > _MOST_UNSENT and self._call is not None:
            self._call.cancel()

    def valid(self, token_ids: list[int]) -> bool:
        return not token_ids or max(token_ids) < self._vocab_size

    async def carry(self, stub: DraftServiceStub) -> None:
        """Run the stream until it ends; then every session on it has lost its draft.

        Raises:
            grpc.RpcError: the stream broke.
        """
        self._call = stub.Propose(_Outgoing(self._unsent))
        beating = asyncio.create_task(self._beat(), name="draft-heartbeats")
        try:
            async for response in self._call:
                self.stalled = False
                if (session := self.sessions.get(response.session_id)) is not None:
                    session.receive(response)
        finally:
            beating.cancel()
            self._call.cancel()
            self.alive = False
            for session in list(self.sessions.values()):
                session.lose("draft_lost")

    async def _beat(self) -> None:
        """Renew all leases three times within a lease, so that two lost beats do no harm."""
        while True:
            await asyncio.sleep(max(self.info.lease_ms, 300) / 3000)
            for session in list(self.sessions.values()):
                session.heartbeat()


class DraftReplica:
    """Keeps a Propose stream to one endpoint, reconnecting for as long as `run` runs."""

    def __init__(self, endpoint: str, limits: BudgetLimits, poll_s: float) -> None:
        self.endpoint = endpoint
        self._limits = limits
        self._poll_s = poll_s
        self._channel = rpc.open_channel(endpoint)
        self._link: _Link | None = None

    @property
    def info(self) -> pb.DraftServiceGetModelInfoResponse | None:
        """What the replica says about itself; None while it is not reachable."""
        return self._link.info if self._link is not None else None

    @property
    def sessions(self) -> int:
        return len(self._link.sessions) if self._link is not None else 0

    def session(
        self, session_id: bytes, target_instance_id: bytes, sampling: Sampling, prompt_length: int
    ) -> DraftSession:
        """A session to open; the replica must be reachable (`info` is not None)."""
        if self._link is None:
            raise RuntimeError("a session was asked of a draft that is not reachable")
        opening = pb.ProposeOpen(
            choice=0,
            target_instance_id=target_instance_id,
            sampling=sampling.to_proto(),
            prompt_length=prompt_length,
        )
        return DraftSession(self._link, session_id, opening)

    async def run(self) -> None:
        stub = DraftServiceStub(self._channel)
        try:
            while True:
                try:
                    await self._serve(stub)
                except grpc.RpcError as error:
                    logger.debug("draft %s: %s", self.endpoint, error)
                except Exception:  # Whatever a draft says, requests go on without it.
                    logger.exception("draft %s: its stream is given up", self.endpoint)
                if self._link is not None:
                    logger.warning(
                        "draft %s: stream ended; decoding goes on without", self.endpoint
                    )
                    self._link = None
                await asyncio.sleep(self._poll_s)
        finally:
            self._link = None
            await self._channel.close(None)

    async def _serve(self, stub: DraftServiceStub) -> None:
        if await ask_health(self._channel, SERVICE) is not Health.SERVING:
            return
        info = await stub.GetModelInfo(
            pb.DraftServiceGetModelInfoRequest(), timeout=_UNARY_TIMEOUT_S
        )
        # A restarted draft may be quick or slow in another way: it is measured anew.
        self._link = _Link(info, LatencyBudget(self._limits, time.monotonic))
        logger.info(
            "draft %s: drafter %r, block length %d", self.endpoint, info.name, info.block_length
        )
        await self._link.carry(stub)


def _reason(reason: pb.RefusalReason) -> str:
    return pb.RefusalReason.Name(reason).removeprefix("REFUSAL_REASON_").lower()
