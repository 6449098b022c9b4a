"""One Ingest stream: the handshake with a target, then its chunks.

The stream owns the transport's receiving end; `run` gives it back, however the stream ends. Chunks
may be read where they lie in the ring; their records are released by the next answer, or soon after
without one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from draft_service import wire
from draft_service.chunk_bytes import ChunkBytes
from draft_service.config import DrafterConfig
from draft_service.coordinator import Coordinator
from draft_service.messages import ChunkArrived
from draft_service.pairing import check_target
from draft_service.refusals import ChunkRefused
from flashduet import PROTOCOL_VERSION, telemetry
from flashduet.errors import DeadlineExceeded, Incompatible, InvalidRequest
from flashduet.transport.base import LENT_RECORDS, FeatureReceiver
from flashduet.transport.negotiation import Receivers, transport_name
from flashduet.v1 import draft_pb2

CAPABILITIES = ("rewind",)
# A target says Hello and attaches at once; whoever does not is not one of ours.
HANDSHAKE_S = 15.0
# How often it is looked whether lent records have come back, while no chunk comes.
RETURNS_S = 0.05

log = logging.getLogger(__name__)


class IngestStream:
    """Translates between one stream and the coordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        receivers: Receivers,
        config: DrafterConfig,
        info: draft_pb2.DraftServiceGetModelInfoResponse,
    ) -> None:
        self._coordinator = coordinator
        self._receivers = receivers
        self._config = config
        self._info = info

    async def run(
        self, requests: AsyncIterator[draft_pb2.IngestRequest]
    ) -> AsyncGenerator[draft_pb2.IngestResponse, None]:
        """Answers to the messages of one stream.

        Raises:
            Incompatible: the two do not belong together; says which property and what to do.
            InvalidRequest: messages out of order. DeadlineExceeded: no handshake in time.
        """
        hello = await self._next(requests, "hello")
        if hello is None:
            return
        yield draft_pb2.IngestResponse(welcome=self._welcome(hello.hello))
        attach = await self._next(requests, "attach")
        if attach is None:
            return
        receiver = await self._receivers.open_receiver(attach.attach)
        target, name = hello.hello.target_instance_id, transport_name(receiver.transport)
        self._coordinator.attach(target, wire.facts_key(hello.hello.facts))
        log.info("target %s (%s) attached over %s", target.hex(), hello.hello.facts.name, name)
        try:
            attached = draft_pb2.IngestAttached(transport=receiver.transport)
            yield draft_pb2.IngestResponse(attached=attached)
            may_lend = LENT_RECORDS in hello.hello.capabilities
            async with aclosing(_chunks(requests, receiver)) as chunks:
                async for request in chunks:
                    response = draft_pb2.IngestResponse()
                    if request is not None:
                        response = self._take(request, target, receiver, may_lend)
                    response.released.extend(receiver.returned())
                    if request is not None or response.released:
                        yield response
        finally:
            receiver.close()
            self._coordinator.detach(target)
            log.info("target %s detached", target.hex())

    async def _next(
        self, requests: AsyncIterator[draft_pb2.IngestRequest], kind: str
    ) -> draft_pb2.IngestRequest | None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                request = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no {kind} within {HANDSHAKE_S:g} s") from None
        if request is not None and request.WhichOneof("message") != kind:
            raise InvalidRequest("message", request.WhichOneof("message"), f"{kind} expected first")
        return request

    def _welcome(self, hello: draft_pb2.IngestHello) -> draft_pb2.IngestWelcome:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise Incompatible(
                f"protocol version: the draft speaks {PROTOCOL_VERSION}, the target "
                f"{hello.protocol_version}; run releases that speak the same"
            )
        if len(hello.target_instance_id) != wire.ID_BYTES:
            raise InvalidRequest(
                "hello.target_instance_id",
                f"{len(hello.target_instance_id)} bytes",
                f"{wire.ID_BYTES} bytes expected",
            )
        check_target(self._config, self._info.target_facts, hello.facts)
        return draft_pb2.IngestWelcome(
            protocol_version=PROTOCOL_VERSION,
            capabilities=CAPABILITIES,
            draft_instance_id=self._info.instance_id,
            accepted=self._receivers.accept(hello.offers),
            target_layer_ids=self._config.target_layer_ids,
            block_length=self._config.block_length,
        )

    def _take(
        self,
        request: draft_pb2.IngestRequest,
        target: bytes,
        receiver: FeatureReceiver,
        may_lend: bool,
    ) -> draft_pb2.IngestResponse:
        chunk = request.chunk
        content = ChunkBytes(chunk, self._config.feature_width, receiver, may_lend)
        arrived = ChunkArrived(
            chunk.session_id,
            chunk.epoch,
            chunk.base,
            chunk.token_ids,
            target,
            content.take,
            transport_name(receiver.transport),
            wire.now_ns(),
            telemetry.context_of(request.traceparent),
            content.intact,
        )
        try:
            end = self._coordinator.ingest(arrived)
        except ChunkRefused as refusal:
            self._coordinator.refused_chunks.add(refusal.reason)
            # A late chunk of a session that has just been closed is nothing unusual.
            level = logging.DEBUG if refusal.reason == "CLOSED_SESSION" else logging.WARNING
            log.log(
                level,
                "chunk of session %s at %d refused: %s",
                chunk.session_id.hex(),
                chunk.base,
                refusal,
            )
            return draft_pb2.IngestResponse(nack=wire.nack(chunk, refusal))
        ack = draft_pb2.IngestAck(
            sequence=chunk.sequence,
            session_id=chunk.session_id,
            epoch=chunk.epoch,
            context_end=end,
            lent=content.lent,
        )
        return draft_pb2.IngestResponse(ack=ack)


async def _chunks(
    requests: AsyncIterator[draft_pb2.IngestRequest], receiver: FeatureReceiver
) -> AsyncGenerator[draft_pb2.IngestRequest | None, None]:
    """The chunks that follow the handshake; None now and then while records are lent.

    Raises:
        InvalidRequest: another message.
    """
    while True:
        if receiver.lent:
            reading = asyncio.ensure_future(_read(requests))
            try:
                # A wait, unlike a timeout, leaves the read under way.
                while not (await asyncio.wait({reading}, timeout=RETURNS_S))[0]:
                    yield None
                request = reading.result()
            finally:
                reading.cancel()
        else:
            request = await _read(requests)
        if request is None:
            return
        if request.WhichOneof("message") != "chunk":
            raise InvalidRequest(
                "message", request.WhichOneof("message"), "only chunks follow Attach"
            )
        yield request


async def _read(
    requests: AsyncIterator[draft_pb2.IngestRequest],
) -> draft_pb2.IngestRequest | None:
    return await anext(requests, None)
