"""The gateway's side of a target replica: what it serves, and a Decode stream for each session."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import grpc
import grpc.aio

from flashduet import rpc
from flashduet.errors import Cancelled, FlashduetError, Unavailable
from flashduet.v1 import target_pb2 as pb
from flashduet.v1.target_pb2_grpc import TargetServiceStub
from gateway.health import Health, ask_health

logger = logging.getLogger(__name__)

SERVICE = "flashduet.v1.TargetService"
_UNARY_TIMEOUT_S = 2.0
# Unanswered health checks in a row after which a target no longer counts as serving.
_MOST_SILENCES = 3
# For the answer to Close; a target that does not give it frees the session by the stream's end.
_CLOSE_BUDGET_S = 1.0


class TargetSession:
    """One request's session on a target. The stream owns it: `abandon` frees it at any time."""

    def __init__(self, replica: TargetReplica, stub: TargetServiceStub) -> None:
        self._replica = replica
        self._call = stub.Decode()
        # Answers that come without being asked for: of plain steps that were asked for together.
        self._coming = 0
        replica.sessions += 1

    async def open(self, opening: pb.DecodeOpen, traceparent: str) -> pb.DecodeOpened:
        """Prefill the prompt; the answer holds the first token.

        Raises:
            FlashduetError: what the target refused, or Unavailable when it is gone.
        """
        answer = await self._ask(pb.DecodeRequest(traceparent=traceparent, open=opening))
        if not answer.HasField("opened"):
            raise FlashduetError("the target answered an opening with another message")
        return answer.opened

    async def verify(
        self,
        round_: int,
        base: int,
        token_ids: list[int],
        traceparent: str,
        *,
        more_steps: int = 0,
        one_by_one: bool = False,
    ) -> pb.DecodeVerified:
        """One pass over the anchor (at position `base`) and the draft tokens; [] is a plain step.

        `more_steps` plain steps follow it without being asked for; fewer where a stop id comes up.
        With `one_by_one` they are the answers to the calls that follow, which ask for nothing then.

        Raises:
            FlashduetError: what the target refused, or Unavailable when it is gone.
        """
        if self._coming:
            self._coming -= 1
            answer = await self._read()
        else:
            verify = pb.DecodeVerify(
                round=round_,
                base=base,
                token_ids=token_ids,
                more_steps=more_steps,
                one_by_one=one_by_one,
            )
            answer = await self._ask(pb.DecodeRequest(traceparent=traceparent, verify=verify))
            # A target of an earlier release gives them together nevertheless.
            together = len(answer.verified.more_token_ids)
            self._coming = more_steps if one_by_one and not together else 0
        verified = answer.verified
        if verified.round != round_ or verified.accepted > len(token_ids):
            raise FlashduetError(
                f"the target answered round {round_} ({len(token_ids)} draft tokens) with round "
                f"{verified.round} ({verified.accepted} accepted)"
            )
        if len(verified.more_token_ids) > more_steps:
            raise FlashduetError("the target took more steps than it was asked for")
        return verified

    async def close(self) -> None:
        """End the session and wait, within a bound, until the target has freed it."""
        with suppress(TimeoutError, FlashduetError):
            async with asyncio.timeout(_CLOSE_BUDGET_S):
                answer = await self._ask(pb.DecodeRequest(close=pb.DecodeClose()))
                while answer.HasField("verified"):
                    # Of a step that nobody wants any more.
                    answer = await self._read()
                await self._call.done_writing()
                await self._call.code()

    def abandon(self) -> None:
        """End the stream, whatever state it is in; safe after `close`, once."""
        self._call.cancel()
        self._replica.sessions -= 1

    async def _ask(self, message: pb.DecodeRequest) -> pb.DecodeResponse:
        try:
            await self._write(message)
        except grpc.RpcError as error:
            raise self._failure(rpc.from_rpc_error(error)) from error
        return await self._read()

    async def _read(self) -> pb.DecodeResponse:
        try:
            answer = await self._call.read()
        except grpc.RpcError as error:
            raise self._failure(rpc.from_rpc_error(error)) from error
        if not isinstance(answer, pb.DecodeResponse):
            raise self._failure(Unavailable("the target ended the session"))
        return answer

    async def _write(self, message: pb.DecodeRequest) -> None:
        try:
            with suppress(asyncio.InvalidStateError):  # It has ended: reading tells how.
                await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
            # It ended under the write, which makes grpc.aio forget with which status.
            raise self._failure(Unavailable("the target ended the session")) from error

    def _failure(self, error: FlashduetError) -> FlashduetError:
        # A stream that the target cancelled is its failure, not the client's wish.
        failure = Unavailable("the target cancelled") if isinstance(error, Cancelled) else error
        if isinstance(failure, Unavailable):
            self._replica.suspect()
        return failure


class TargetReplica:
    """Watches one target endpoint for as long as `run` runs.

    Attributes:
        info: what the target says about itself; None while it does not serve.
        sessions: sessions that this gateway has open there.
    """

    def __init__(self, endpoint: str, poll_s: float) -> None:
        self.endpoint = endpoint
        self.info: pb.TargetServiceGetModelInfoResponse | None = None
        self.sessions = 0
        self._poll_s = poll_s
        self._channel = rpc.open_channel(endpoint)
        self._stub = TargetServiceStub(self._channel)
        self._silences = 0
        self._look = asyncio.Event()

    def session(self) -> TargetSession:
        return TargetSession(self, self._stub)

    def suspect(self) -> None:
        """A session failed as if the target were gone: look at once, do without it meanwhile."""
        self.info = None
        self._look.set()

    async def run(self) -> None:
        try:
            while True:
                self._look.clear()
                await self.refresh()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), self._poll_s)
        finally:
            self.info = None
            await self._channel.close(None)

    async def refresh(self) -> None:
        """Ask the target now whether and what it serves.

        One that does not answer in time is believed to be busy, a few times in a row.
        """
        known = self.info
        health = await ask_health(self._channel, SERVICE)
        self._silences = self._silences + 1 if health is Health.SILENT else 0
        if health is Health.SERVING:
            self.info = await self._ask_info() or self.info
        elif health is Health.DOWN or self._silences > _MOST_SILENCES:
            self.info = None
        if known is None and self.info is not None:
            facts = self.info.facts
            logger.info("target %s serves %r on %s", self.endpoint, facts.name, self.info.device)
        elif known is not None and self.info is None:
            logger.warning("target %s no longer serves", self.endpoint)

    async def _ask_info(self) -> pb.TargetServiceGetModelInfoResponse | None:
        try:
            return await self._stub.GetModelInfo(
                pb.TargetServiceGetModelInfoRequest(), timeout=_UNARY_TIMEOUT_S
            )
        except grpc.RpcError:
            return None
