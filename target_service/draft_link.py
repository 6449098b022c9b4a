"""Keeps one Ingest stream to one draft endpoint, for as long as the service runs."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from flashduet import PROTOCOL_VERSION, rpc
from flashduet.errors import FlashduetError, Incompatible, Unavailable
from flashduet.transport.base import LENT_RECORDS
from flashduet.transport.negotiation import open_sender, transport_name
from flashduet.transport.options import TransportOptions
from flashduet.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from target_service.drops import DropCounts
from target_service.features import FeatureCapture
from target_service.ingest_stream import IngestStream
from target_service.sessions import check_id

log = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0

_Call = grpc.aio.StreamStreamCall[draft_pb2.IngestRequest, draft_pb2.IngestResponse]


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What a target says of itself in every handshake."""

    instance_id: bytes
    facts: common_pb2.ModelFacts
    # Transports that this process can do, best first.
    offers: tuple[common_pb2.Transport, ...]


class DraftLink:
    """One endpoint: connects, shakes hands, carries chunks, and starts over when it ends."""

    def __init__(
        self,
        endpoint: str,
        identity: TargetIdentity,
        options: TransportOptions,
        features: FeatureCapture,
        drops: DropCounts,
    ) -> None:
        self.stream: IngestStream | None = None
        self._endpoint = endpoint
        self._identity = identity
        self._options = options
        self._features = features
        self._drops = drops
        self._last_complaint = ""
        self._was_attached = False

    async def run(self) -> None:
        """Until cancelled. A draft that is away or does not fit is tried again, more slowly."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._attend()
            except (FlashduetError, grpc.RpcError, OSError, TimeoutError) as error:
                self._complain(error)
            except Exception:
                log.exception("the link to draft %s failed", self._endpoint)
            if self.stream is not None:
                self.stream.close()
                self.stream, backoff_s = None, _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _attend(self) -> None:
        async with rpc.open_channel(self._endpoint) as channel:
            call: _Call = draft_pb2_grpc.DraftServiceStub(channel).Ingest()
            try:
                async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                    self.stream = await self._shake_hands(call)
                await self._carry(call, self.stream)
            finally:
                if self.stream is not None:
                    self.stream.close()
                call.cancel()

    async def _shake_hands(self, call: _Call) -> IngestStream:
        hello = draft_pb2.IngestHello(
            protocol_version=PROTOCOL_VERSION,
            capabilities=[LENT_RECORDS],
            target_instance_id=self._identity.instance_id,
            facts=self._identity.facts,
            offers=self._identity.offers,
        )
        await call.write(draft_pb2.IngestRequest(hello=hello))
        welcome = (await _read(call, "welcome")).welcome
        layer_ids = self._check(welcome)
        sender, attach = await open_sender(
            list(welcome.accepted), welcome.draft_instance_id, self._options
        )
        try:
            await call.write(draft_pb2.IngestRequest(attach=attach))
            await _read(call, "attached")
        except BaseException:
            sender.close()
            raise
        self._last_complaint, self._was_attached = "", True
        log.info(
            "draft %s at %s attached by %s, layers %s",
            welcome.draft_instance_id.hex(),
            self._endpoint,
            transport_name(attach.transport),
            list(layer_ids),
        )
        return IngestStream(welcome.draft_instance_id, layer_ids, sender, self._drops)

    def _check(self, welcome: draft_pb2.IngestWelcome) -> tuple[int, ...]:
        """The draft's layer ids, once its welcome has proved to fit this target."""
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise Incompatible(
                f"the draft speaks protocol {welcome.protocol_version}, this target "
                f"{PROTOCOL_VERSION}; run the same release on both"
            )
        check_id("welcome.draft_instance_id", welcome.draft_instance_id)
        self._features.check(welcome.target_layer_ids)
        return tuple(welcome.target_layer_ids)

    async def _carry(self, call: _Call, stream: IngestStream) -> None:
        """Write chunks and read answers until the reader raises what ended the stream."""
        reading = asyncio.create_task(_read_answers(call, stream))
        writing = asyncio.create_task(_write_chunks(call, stream))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            reading.cancel()
            writing.cancel()
            # Waited for, so that no callback touches a closed stream. `wait`, unlike `gather` or a
            # TaskGroup, takes no cancellation of this link for one of its tasks.
            await asyncio.wait({reading, writing})
        for task in (reading, writing):
            if not task.cancelled():
                task.result()

    def _complain(self, error: BaseException) -> None:
        """Log a failure once, not at every attempt."""
        if isinstance(error, grpc.aio.AioRpcError):
            error = rpc.from_rpc_error(error)
        text = str(error) or type(error).__name__
        level = logging.ERROR if isinstance(error, Incompatible) else logging.WARNING
        if isinstance(error, Unavailable) and not self._was_attached:
            level = logging.INFO  # Both start at the same time, and the draft may load for longer.
        if text != self._last_complaint:
            log.log(level, "draft %s: %s; trying again", self._endpoint, text)
        self._last_complaint = text


async def _write_chunks(call: _Call, stream: IngestStream) -> None:
    # A write that meets the stream's end says less of it than the reader will.
    with suppress(grpc.RpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await stream.next_request())


async def _read_answers(call: _Call, stream: IngestStream) -> None:
    while (response := await _next(call)) is not None:
        stream.receive(response)
    raise await _end_of(call)


async def _next(call: _Call) -> draft_pb2.IngestResponse | None:
    response = await call.read()
    return None if response is EOF else cast(draft_pb2.IngestResponse, response)


async def _read(call: _Call, kind: str) -> draft_pb2.IngestResponse:
    response = await _next(call)
    if response is None:
        raise await _end_of(call)
    if response.WhichOneof("message") != kind:
        raise Incompatible(f"the draft answered {response.WhichOneof('message')}, not {kind}")
    return response


async def _end_of(call: _Call) -> FlashduetError:
    """Why the draft ended the stream."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return Incompatible(details or code.name)
    return Unavailable(f"the stream ended: {details or code.name}")
