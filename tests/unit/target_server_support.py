"""A target service and an Ingest peer over real gRPC in one process, for the server's tests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch

from flashduet.rpc import Server, open_channel
from flashduet.transport.negotiation import Receivers
from flashduet.transport.options import TransportOptions
from flashduet.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_service.server import SERVICE_NAME, TargetServicer
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.unit.target_support import TinyTarget

# What takes milliseconds on an idle machine has this long.
WAIT_S = 60.0


@dataclass
class RunningTarget:
    service: TargetService
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return target_pb2_grpc.TargetServiceStub(self.channel)

    async def load(self) -> target_pb2.TargetServiceGetLoadResponse:
        return await self.stub.GetLoad(target_pb2.TargetServiceGetLoadRequest(), timeout=WAIT_S)

    async def info(self) -> target_pb2.TargetServiceGetModelInfoResponse:
        request = target_pb2.TargetServiceGetModelInfoRequest()
        return await self.stub.GetModelInfo(request, timeout=WAIT_S)

    def decode(self, **call: Any) -> Stream:
        return Stream(self.stub.Decode(**call))

    async def nothing_left(self) -> None:
        """Sessions, KV, queue and ring records come to zero."""

        async def empty() -> bool:
            load = await self.load()
            held = (load.sessions, load.kv_tokens, load.queued_items, load.ring_records)
            return held == (0, 0, 0, 0)

        await eventually(empty)

    async def opened(self, sessions: int) -> None:
        """Wait until so many sessions are there."""

        async def there() -> bool:
            return (await self.load()).sessions == sessions

        await eventually(there)

    async def attached(self, count: int = 1) -> Sequence[target_pb2.AttachedDraft]:
        async def there() -> bool:
            return len((await self.info()).drafts) == count

        await eventually(there)
        return (await self.info()).drafts


class Stream:
    """The gateway's end of one Decode stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.tokens: list[int] = []
        self.rounds = 0

    async def send_open(self, tokens: list[int], **fields: Any) -> None:
        message = target_pb2.DecodeOpen(
            **{"session_id": os.urandom(16), "token_ids": tokens, "max_tokens": 100} | fields
        )
        self.tokens = list(tokens)
        await self.call.write(target_pb2.DecodeRequest(open=message))

    async def open(self, tokens: list[int], **fields: Any) -> target_pb2.DecodeOpened:
        await self.send_open(tokens, **fields)
        opened = (await self._read()).opened
        self.tokens.append(opened.first_token_id)
        return opened

    async def send_verify(self, drafts: Sequence[int] = (), **fields: Any) -> None:
        self.rounds += 1
        values = {"round": self.rounds, "base": len(self.tokens) - 1, "token_ids": drafts}
        verify = target_pb2.DecodeVerify(**values | fields)
        await self.call.write(target_pb2.DecodeRequest(verify=verify))

    async def verify(self, drafts: Sequence[int] = (), **fields: Any) -> target_pb2.DecodeVerified:
        await self.send_verify(drafts, **fields)
        return await self.verified(drafts)

    async def verified(self, drafts: Sequence[int] = ()) -> target_pb2.DecodeVerified:
        """The next answer, to this stream's last round."""
        verified = (await self._read()).verified
        assert verified.round == self.rounds
        self.tokens += [*drafts[: verified.accepted], verified.bonus_token_id]
        self.tokens += verified.more_token_ids
        return verified

    async def next_step(self) -> target_pb2.DecodeVerified:
        """The answer to a plain step that came without being asked for."""
        self.rounds += 1
        return await self.verified()

    async def close(self, *, steps_to_come: bool = False) -> None:
        await self.call.write(target_pb2.DecodeRequest(close=target_pb2.DecodeClose()))
        answer = await self._read()
        while steps_to_come and answer.WhichOneof("message") == "verified":
            answer = await self._read()
        assert answer.WhichOneof("message") == "closed"
        assert await self.call.code() is grpc.StatusCode.OK

    async def failure(self, *, steps_to_come: bool = False) -> grpc.aio.AioRpcError:
        """The error that the stream ends with."""
        try:
            message = await self._read()
            while steps_to_come and message.WhichOneof("message") == "verified":
                message = await self._read()
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"an error was expected, {message} came")

    async def _read(self) -> Any:
        return await asyncio.wait_for(self.call.read(), WAIT_S)


@asynccontextmanager
async def running_target(
    tiny: TinyTarget, socket_dir: Path, **settings: Any
) -> AsyncIterator[RunningTarget]:
    given = {"socket_dir": socket_dir, "ring_mib": 1, "prefill_chunk_tokens": 16} | settings
    servicer, server = TargetServicer(), Server([SERVICE_NAME])
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    await server.start("127.0.0.1:0")
    service = TargetService.start(TargetSettings(**given), tiny.target, tiny.engine)
    servicer.service = service
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            yield RunningTarget(service, channel)
    finally:
        await server.stop(0)
        await service.close()


class IngestPeer(draft_pb2_grpc.DraftServiceServicer):
    """The receiving half of a draft: takes chunks by the real transport and checks their order.

    Attributes:
        context: per session id, all features in order [rows, width].
        silent: neither ack nor nack, as a draft that hangs.
        refuse_from: base from which on chunks are refused.
    """

    def __init__(self, socket_dir: Path, layer_ids: Sequence[int], transports: Any) -> None:
        self.instance_id = os.urandom(16)
        self.layer_ids = list(layer_ids)
        self.context: dict[bytes, list[torch.Tensor]] = {}
        self.token_ids: dict[bytes, list[int]] = {}
        self.traceparents: list[str] = []
        self.silent = False
        self.refuse_from: int | None = None
        self.streams = 0
        options = TransportOptions(transports, "cpu", socket_dir)
        self.receivers = Receivers(self.instance_id, options)

    async def Ingest(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        hello = (await context.read()).hello
        welcome = draft_pb2.IngestWelcome(
            protocol_version=hello.protocol_version,
            draft_instance_id=self.instance_id,
            accepted=self.receivers.accept(hello.offers),
            target_layer_ids=self.layer_ids,
            block_length=8,
        )
        await context.write(draft_pb2.IngestResponse(welcome=welcome))
        attach = (await context.read()).attach
        receiver = await self.receivers.open_receiver(attach)
        attached = draft_pb2.IngestAttached(transport=receiver.transport)
        await context.write(draft_pb2.IngestResponse(attached=attached))
        self.streams += 1
        width = len(self.layer_ids) * hello.facts.hidden_size
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                self.traceparents.append(request.traceparent)
                if not self.silent:
                    await context.write(self._take(request.chunk, receiver, width))
        finally:
            receiver.close()

    def features(self, session_id: bytes) -> torch.Tensor:
        return torch.cat(self.context[session_id])

    def _take(self, chunk: draft_pb2.IngestChunk, receiver: Any, width: int) -> Any:
        key = {"sequence": chunk.sequence, "session_id": chunk.session_id, "epoch": chunk.epoch}
        held = self.token_ids.setdefault(chunk.session_id, [])
        if self.refuse_from is not None and chunk.base >= self.refuse_from:
            nack = draft_pb2.IngestNack(**key, reason="NACK_REASON_GAP", have=len(held))
            return draft_pb2.IngestResponse(nack=nack)
        assert chunk.base == len(held), "a gap"
        rows = receiver.take(
            chunk.session_id,
            chunk.epoch,
            chunk.base,
            len(chunk.token_ids),
            width,
            chunk.features,
        )
        self.context.setdefault(chunk.session_id, []).append(rows)
        held.extend(chunk.token_ids)
        ack = draft_pb2.IngestAck(**key, context_end=len(held))
        return draft_pb2.IngestResponse(ack=ack)


@asynccontextmanager
async def running_peer(
    socket_dir: Path,
    layer_ids: Sequence[int],
    transports: str = "auto",
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[tuple[IngestPeer, str]]:
    """The peer and its endpoint; leaving it is as sudden as a crash."""
    peer, server = IngestPeer(socket_dir, layer_ids, transports), Server([])
    draft_pb2_grpc.add_DraftServiceServicer_to_server(peer, server.grpc)
    await peer.receivers.start()
    await server.start(listen)
    try:
        yield peer, f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
        await peer.receivers.close()


@contextmanager
def slowed(tiny: TinyTarget, seconds: float) -> Iterator[None]:
    """Every pass of the target takes `seconds` longer."""
    handle = tiny.target.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        handle.remove()


async def eventually(condition: Callable[[], Any], within_s: float = WAIT_S) -> None:
    """Wait until `condition()` (an awaitable) is true."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110 (asked over the wire)
            await asyncio.sleep(0.02)
