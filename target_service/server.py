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
from flashduet.errors import Conflict, DeadlineExceeded, InvalidRequest, Unavailable
from flashduet.sampling import MAX_TOP_LOGPROBS
from flashduet.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.feed import SessionFeed
from target_service.service import TargetService
from target_service.session import Session
from target_service.tracing import MessageSpan, add_timings, phase_timings

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
        await _Decode(service, context).run(request)

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


class _Decode:
    """One stream, which is one session; leaving `run`, by whatever way, frees it."""

    def __init__(self, service: TargetService, context: _Context) -> None:
        self._service = service
        self._context = context
        self._last_round = -1
        self._stop_ids: frozenset[int] = frozenset()

    async def run(self, request: target_pb2.DecodeRequest) -> None:
        given = request.open.deadline_ms if request.open.HasField("deadline_ms") else None
        try:
            async with asyncio.timeout(None if given is None else given / 1000):
                await self._serve(request)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the session's {given} ms are over") from error

    async def _serve(self, request: target_pb2.DecodeRequest) -> None:
        session = self._service.sessions.open(request.open)
        self._stop_ids = frozenset(request.open.stop_token_ids)
        feed = None
        try:
            feed = self._feed(request.open)
            await self._prefill(request, session, feed)
            while (request := await self._context.read()) is not EOF:
                kind = request.WhichOneof("message")
                if kind == "close":
                    break
                if kind != "verify":
                    raise InvalidRequest("message", kind, "verify or close expected")
                await self._verify(request, session, feed)
            else:
                return
        finally:
            self._service.sessions.close(session)
            self._service.scheduler.leave(session)
            if feed is not None:
                feed.close()
        await self._write(target_pb2.DecodeResponse(closed=target_pb2.DecodeClosed()))

    def _feed(self, message: target_pb2.DecodeOpen) -> SessionFeed | None:
        if not message.HasField("draft_instance_id"):
            return None
        return self._service.publisher.open_feed(
            message.draft_instance_id, message.session_id, message.epoch
        )

    async def _prefill(
        self, request: target_pb2.DecodeRequest, session: Session, feed: SessionFeed | None
    ) -> None:
        attributes: dict[str, str | int] = {
            "session": session.session_id.hex(),
            "epoch": session.epoch,
            "tokens": session.committed_length,
            "transport": feed.transport if feed is not None else "none",
        }
        with MessageSpan("target.prefill", request.traceparent, attributes) as span:
            outcome = await self._service.scheduler.prefill(session, feed, span.traceparent)
            span.record(outcome)
            opened = target_pb2.DecodeOpened(
                first_token_id=outcome.committed[0],
                cached_tokens=outcome.cached_tokens,
                drafting=feed is not None and feed.drafting,
                timings=phase_timings(outcome),
                prefill_chunks=outcome.chunks,
            )
            if outcome.logprobs:
                opened.first_logprobs.CopyFrom(outcome.logprobs[0].to_proto())
            await self._write(target_pb2.DecodeResponse(opened=opened))

    async def _verify(
        self, request: target_pb2.DecodeRequest, session: Session, feed: SessionFeed | None
    ) -> None:
        message = request.verify
        if message.round <= self._last_round:
            raise Conflict(f"verify.round {message.round} given, {self._last_round} is done")
        self._service.sessions.check_round(session, message)
        attributes: dict[str, str | int] = {
            "session": session.session_id.hex(),
            "epoch": session.epoch,
            "round": message.round,
            "base": message.base,
            "tokens": len(message.token_ids),
            "transport": feed.transport if feed is not None else "none",
        }
        with MessageSpan("target.verify", request.traceparent, attributes) as span:
            outcome = await self._service.scheduler.verify(
                session, feed, message.base, message.token_ids, span.traceparent
            )
            self._last_round = message.round
            span.record(outcome)
            verified = target_pb2.DecodeVerified(
                round=message.round,
                accepted=outcome.accepted,
                bonus_token_id=outcome.committed[-1],
                timings=phase_timings(outcome),
                logprobs=[logprobs.to_proto() for logprobs in outcome.logprobs],
            )
            await self._go_on(message.more_steps, session, feed, verified, span)
            verified.drafting = feed is not None and feed.drafting
            await self._write(target_pb2.DecodeResponse(verified=verified))

    async def _go_on(
        self,
        steps: int,
        session: Session,
        feed: SessionFeed | None,
        verified: target_pb2.DecodeVerified,
        span: MessageSpan,
    ) -> None:
        """Plain steps after a round, which spare the gateway a message each."""
        token_id = verified.bonus_token_id
        for _ in range(steps):
            if token_id in self._stop_ids:
                return
            outcome = await self._service.scheduler.verify(
                session, feed, session.anchor_position, (), span.traceparent
            )
            span.record(outcome)
            (token_id,) = outcome.committed
            verified.more_token_ids.append(token_id)
            verified.logprobs.extend(logprobs.to_proto() for logprobs in outcome.logprobs)
            add_timings(verified.timings, phase_timings(outcome))

    async def _write(self, response: target_pb2.DecodeResponse) -> None:
        await self._context.write(response)
