"""The gRPC face: translates calls and decides nothing.

Errors reach the caller through `flashduet.rpc.Server`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import grpc.aio

from draft_service.config import DrafterConfig
from draft_service.coordinator import Coordinator
from draft_service.ingest_stream import IngestStream
from draft_service.propose_stream import ProposeStream
from flashduet.errors import Unavailable
from flashduet.transport.negotiation import Receivers
from flashduet.v1 import draft_pb2, draft_pb2_grpc

SERVICE_NAME = "flashduet.v1.DraftService"


@dataclass(frozen=True, slots=True)
class LoadedService:
    """What a loaded service answers with; `info` lacks only the targets attached just now."""

    coordinator: Coordinator
    receivers: Receivers
    config: DrafterConfig
    info: draft_pb2.DraftServiceGetModelInfoResponse


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Answers UNAVAILABLE until `loaded` is set."""

    def __init__(self) -> None:
        self.loaded: LoadedService | None = None

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        loaded = self._loaded()
        stream = ProposeStream(loaded.coordinator, context)
        try:
            async for request in request_iterator:
                await stream.handle(request)
        finally:
            await stream.close()

    async def Ingest(
        self,
        request_iterator: AsyncIterator[draft_pb2.IngestRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        loaded = self._loaded()
        stream = IngestStream(loaded.coordinator, loaded.receivers, loaded.config, loaded.info)
        responses = stream.run(aiter(request_iterator))
        async with aclosing(responses):
            async for response in responses:
                await context.write(response)

    async def GetModelInfo(
        self,
        request: draft_pb2.DraftServiceGetModelInfoRequest,
        context: grpc.aio.ServicerContext,
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        loaded = self._loaded()
        info = draft_pb2.DraftServiceGetModelInfoResponse()
        info.CopyFrom(loaded.info)
        info.target_instance_ids.extend(loaded.coordinator.targets)
        return info

    async def GetLoad(
        self,
        request: draft_pb2.DraftServiceGetLoadRequest,
        context: grpc.aio.ServicerContext,
    ) -> draft_pb2.DraftServiceGetLoadResponse:
        loaded = self._loaded()
        coordinator, contexts = loaded.coordinator, loaded.coordinator.contexts
        return draft_pb2.DraftServiceGetLoadResponse(
            sessions=len(coordinator.sessions),
            max_sessions=coordinator.limits.max_sessions,
            context_rows=coordinator.sessions.context_rows,
            max_context_rows=contexts.rows,
            queued_proposals=coordinator.queued_proposals,
            rings=loaded.receivers.rings,
            proposals=coordinator.proposals,
            refused_chunks=coordinator.refused_chunks.to_proto(),
            refused_proposals=coordinator.refused_proposals.to_proto(),
            context_blocks=contexts.blocks,
            free_context_blocks=contexts.free_blocks,
            cached_context_blocks=contexts.cached_blocks,
            context_block_rows=contexts.block_rows,
            step_times=coordinator.step_times,
        )

    def _loaded(self) -> LoadedService:
        if self.loaded is None:
            raise Unavailable("the drafter is still loading")
        return self.loaded
