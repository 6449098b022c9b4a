"""Translates between the wire and the engine; decides nothing.

Errors reach the caller through `flashduet.rpc.Server`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from flashduet import PROTOCOL_VERSION
from flashduet.errors import DeadlineExceeded, InvalidRequest, Unavailable
from flashduet.sampling import MAX_TOP_LOGPROBS
from flashduet.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.decode_stream import DecodeStream
from target_service.service import TargetService

SERVICE_NAME = "flashduet.v1.TargetService"

# A stream that is opened and then says nothing holds no session, but it does hold a stream.
_OPEN_TIMEOUT_S = 30.0

_Context = grpc.aio.ServicerContext


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Answers Unavailable until `service` is set."""

    def __init__(self) -> None:
        self.service: TargetService | None = None

    async def Decode(self, requests: Any, context: _Context) -> None:
        service = self._ready()
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                request = await context.read()
        except TimeoutError:
            raise DeadlineExceeded("no open came with the stream") from None
        if request is EOF:
            return
        if request.WhichOneof("message") != "open":
            raise InvalidRequest("message", request.WhichOneof("message"), "open comes first")
        await DecodeStream(service, context).run(request)

    async def GetModelInfo(
        self, request: target_pb2.TargetServiceGetModelInfoRequest, context: _Context
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        service = self._ready()
        limits = service.sessions.limits
        return target_pb2.TargetServiceGetModelInfoResponse(
            instance_id=service.identity.instance_id,
            protocol_version=PROTOCOL_VERSION,
            facts=service.identity.facts,
            max_sessions=limits.max_sessions,
            max_block_length=limits.max_block_length,
            device=service.device,
            drafts=[
                target_pb2.AttachedDraft(
                    instance_id=stream.draft_instance_id,
                    transport=stream.sender.transport,  # type: ignore[arg-type]
                    target_layer_ids=stream.layer_ids,
                )
                for stream in service.publisher.streams()
            ],
            numerics=service.numerics,
            max_top_logprobs=MAX_TOP_LOGPROBS,
        )

    async def GetLoad(
        self, request: target_pb2.TargetServiceGetLoadRequest, context: _Context
    ) -> target_pb2.TargetServiceGetLoadResponse:
        service = self._ready()
        kv = service.scheduler.kv_load()
        return target_pb2.TargetServiceGetLoadResponse(
            sessions=service.sessions.count,
            max_sessions=service.sessions.limits.max_sessions,
            kv_tokens=kv.held_tokens,
            max_kv_tokens=kv.num_blocks * kv.block_tokens,
            queued_items=service.scheduler.queued_items,
            ring_records=service.publisher.ring_records,
            steps=service.scheduler.steps,
            dropped_chunks=[
                common_pb2.ReasonCount(reason=reason, count=count)
                for reason, count in sorted(service.publisher.drops.by_reason().items())
            ],
            kv_blocks=kv.num_blocks,
            free_kv_blocks=kv.free_blocks,
            cached_kv_blocks=kv.cached_blocks,
            kv_block_tokens=kv.block_tokens,
            preemptions=kv.preemptions,
            prompt_tokens=kv.prompt_tokens,
            cached_prompt_tokens=kv.cached_prompt_tokens,
            step_times=[
                common_pb2.StepTime(
                    max_tokens=size.max_tokens,
                    steps=size.steps,
                    mean_us=round(size.mean_s * 1e6),
                    p99_us=round(size.p99_s * 1e6),
                )
                for size in service.scheduler.step_times()
            ],
        )

    def _ready(self) -> TargetService:
        if self.service is None:
            raise Unavailable("the target is still loading its weights")
        return self.service
