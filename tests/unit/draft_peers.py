"""The two kinds of client that a draft service has, spoken by hand so that they can misbehave."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Self

import grpc.aio
import torch

from flashduet import PROTOCOL_VERSION, rpc
from flashduet.transport.base import FeatureSender
from flashduet.transport.inline import InlineSender
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from flashduet.v1 import draft_pb2_grpc

SECONDS = 60.0


class TargetPeer:
    """A target: one Ingest stream."""

    def __init__(self, channel: grpc.aio.Channel, facts: pb.ModelFacts) -> None:
        self.instance_id = os.urandom(16)
        self.facts = facts
        self._call = draft_pb2_grpc.DraftServiceStub(channel).Ingest()
        self._sender: FeatureSender = InlineSender(1 << 24)
        self._sequence = 0
        self.traceparent = ""

    def hello(self, **changes: object) -> dp.IngestRequest:
        fields: dict[str, object] = {
            "protocol_version": PROTOCOL_VERSION,
            "target_instance_id": self.instance_id,
            "facts": self.facts,
            "offers": [pb.TRANSPORT_INLINE],
        }
        return dp.IngestRequest(hello=dp.IngestHello(**{**fields, **changes}))

    def use(self, sender: FeatureSender) -> None:
        """Send chunks by another transport than inline."""
        self._sender = sender

    async def send(self, request: dp.IngestRequest) -> None:
        await asyncio.wait_for(self._call.write(request), SECONDS)

    async def receive(self) -> dp.IngestResponse:
        response = await asyncio.wait_for(self._call.read(), SECONDS)
        if response is grpc.aio.EOF:
            raise AssertionError(f"the stream ended: {await self._call.details()}")
        return response

    async def handshake(self) -> dp.IngestWelcome:
        await self.send(self.hello())
        welcome = (await self.receive()).welcome
        await self.send(dp.IngestRequest(attach=dp.IngestAttach(transport=pb.TRANSPORT_INLINE)))
        assert (await self.receive()).HasField("attached")
        return welcome

    async def chunk(
        self,
        session_id: bytes,
        base: int,
        rows: torch.Tensor,
        epoch: int = 0,
        **changes: object,
    ) -> dp.IngestResponse:
        """Send rows and return the answer; `changes` overwrite the chunk's fields."""
        self._sequence += 1
        payload = self._sender.put(self._sequence, session_id, epoch, base, rows)
        assert payload is not None
        fields: dict[str, object] = {
            "session_id": session_id,
            "epoch": epoch,
            "base": base,
            "token_ids": [7] * len(rows),
            "features": payload,
            "sequence": self._sequence,
        }
        chunk = dp.IngestChunk(**{**fields, **changes})
        await self.send(dp.IngestRequest(chunk=chunk, traceparent=self.traceparent))
        response = await self.receive()
        answered = getattr(response, str(response.WhichOneof("message")))
        assert answered.sequence == self._sequence
        self._sender.release(self._sequence)
        return response

    async def end(self) -> None:
        self._call.cancel()
        await asyncio.wait([asyncio.ensure_future(self._call.code())], timeout=SECONDS)

    async def failure(self) -> rpc.errors.FlashduetError:
        """The error with which the service ended the stream."""
        try:
            await asyncio.wait_for(self._call.read(), SECONDS)
        except grpc.aio.AioRpcError as error:
            return rpc.from_rpc_error(error)
        raise AssertionError("the stream did not fail")


@dataclass
class GatewayPeer:
    """A gateway: one Propose stream. Answers are read one by one, in order."""

    call: grpc.aio.StreamStreamCall
    traceparent: str = ""

    @classmethod
    def on(cls, channel: grpc.aio.Channel) -> Self:
        return cls(draft_pb2_grpc.DraftServiceStub(channel).Propose())

    async def send(self, session_id: bytes, epoch: int = 0, **message: object) -> None:
        request = dp.ProposeRequest(
            session_id=session_id, epoch=epoch, traceparent=self.traceparent, **message
        )
        await asyncio.wait_for(self.call.write(request), SECONDS)

    async def receive(self, seconds: float = SECONDS) -> dp.ProposeResponse:
        response = await asyncio.wait_for(self.call.read(), seconds)
        assert response is not grpc.aio.EOF
        return response

    async def open(
        self,
        session_id: bytes,
        target: TargetPeer,
        epoch: int = 0,
        sampling: pb.SamplingParams | None = None,
        **more: object,
    ) -> dp.ProposeResponse:
        """`more`: further fields of the message."""
        fields: dict[str, object] = {
            "target_instance_id": target.instance_id,
            "sampling": sampling or pb.SamplingParams(),
            "prompt_length": 8,
        }
        message = dp.ProposeOpen(**{**fields, **more})
        await self.send(session_id, epoch, open=message)
        return await self.receive()

    async def ask(
        self,
        session_id: bytes,
        committed_length: int,
        epoch: int = 0,
        *,
        round: int = 1,
        anchor: int = 5,
        block_length: int = 8,
        budget_s: float = SECONDS,
    ) -> None:
        """Send a proposal without reading its answer."""
        block = dp.ProposeBlock(
            round=round,
            committed_length=committed_length,
            anchor_token_id=anchor,
            block_length=block_length,
            budget_us=int(budget_s * 1e6),
        )
        await self.send(session_id, epoch, block=block)

    async def propose(
        self, session_id: bytes, committed_length: int, epoch: int = 0, **options: object
    ) -> dp.ProposeResponse:
        await self.ask(session_id, committed_length, epoch, **options)  # type: ignore[arg-type]
        return await self.receive()

    async def end(self) -> None:
        self.call.cancel()
        await asyncio.wait([asyncio.ensure_future(self.call.code())], timeout=SECONDS)
