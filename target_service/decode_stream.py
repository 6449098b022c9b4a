"""One Decode stream: a session's messages in, answers out. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from flashduet.errors import Conflict, DeadlineExceeded, InvalidRequest
from flashduet.v1 import target_pb2
from target_service.feed import SessionFeed
from target_service.job import Outcome
from target_service.service import TargetService
from target_service.session import Session
from target_service.tracing import MessageSpan, add_timings, phase_timings


class DecodeStream:
    """One stream, which is one session; leaving `run`, by whatever way, frees it."""

    def __init__(self, service: TargetService, context: grpc.aio.ServicerContext) -> None:
        self._service = service
        self._context = context
        self._last_round = -1
        self._stop_ids: frozenset[int] = frozenset()
        # A read that was begun while answers were still to be written.
        self._reading: asyncio.Future[Any] | None = None

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
            while (request := await self._next()) is not EOF:
                kind = request.WhichOneof("message")
                if kind == "close":
                    break
                if kind != "verify":
                    raise InvalidRequest("message", kind, "verify or close expected")
                await self._verify(request, session, feed)
            else:
                return
        finally:
            if self._reading is not None:
                self._reading.cancel()
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
        """A round, and the plain steps after it that spare the gateway a message each."""
        message = request.verify
        if message.round <= self._last_round:
            raise Conflict(f"verify.round {message.round} given, {self._last_round} is done")
        self._service.sessions.check_round(session, message)
        span = self._span(
            request.traceparent,
            session,
            feed,
            message.round,
            message.base,
            len(message.token_ids),
        )
        outcomes = self._service.scheduler.rounds(
            session,
            feed,
            message.base,
            message.token_ids,
            span.traceparent,
            more_steps=message.more_steps,
            stop_ids=self._stop_ids,
        )
        async with aclosing(outcomes):
            if message.one_by_one and message.more_steps:
                await self._answer_each(request, session, feed, span, outcomes)
            else:
                await self._answer_together(message, feed, span, outcomes)

    async def _answer_together(
        self,
        message: target_pb2.DecodeVerify,
        feed: SessionFeed | None,
        span: MessageSpan,
        outcomes: AsyncIterator[Outcome],
    ) -> None:
        with span:
            outcome = await anext(outcomes)
            self._last_round = message.round
            span.record(outcome)
            verified = _verified(message.round, outcome)
            async for outcome in outcomes:
                span.record(outcome)
                verified.more_token_ids.extend(outcome.committed)
                verified.logprobs.extend(logprobs.to_proto() for logprobs in outcome.logprobs)
                add_timings(verified.timings, phase_timings(outcome))
            await self._write_verified(verified, feed)

    async def _answer_each(
        self,
        request: target_pb2.DecodeRequest,
        session: Session,
        feed: SessionFeed | None,
        span: MessageSpan,
        outcomes: AsyncIterator[Outcome],
    ) -> None:
        """Until all have come, the gateway closes, or its stream ends."""
        message = request.verify
        round_, last, base = message.round, message.round + message.more_steps, message.base
        self._reading = asyncio.ensure_future(self._context.read())
        while True:
            with span:
                outcome = await anext(outcomes)
                self._last_round = round_
                span.record(outcome)
                await self._write_verified(_verified(round_, outcome), feed)
            if round_ == last or outcome.committed[-1] in self._stop_ids:
                return
            if self._reading.done():
                _require_no_verify(self._reading.result())
                return
            round_, base = round_ + 1, base + len(outcome.committed)
            span = self._span(request.traceparent, session, feed, round_, base)

    @staticmethod
    def _span(
        traceparent: str,
        session: Session,
        feed: SessionFeed | None,
        round_: int,
        base: int,
        tokens: int = 0,
    ) -> MessageSpan:
        """Of a round, or of a plain step that follows it; begins now."""
        attributes: dict[str, str | int] = {
            "session": session.session_id.hex(),
            "epoch": session.epoch,
            "round": round_,
            "base": base,
            "tokens": tokens,
            "transport": feed.transport if feed is not None else "none",
        }
        return MessageSpan("target.verify", traceparent, attributes)

    async def _next(self) -> Any:
        """The next message, or EOF."""
        reading, self._reading = self._reading, None
        return await (reading or self._context.read())

    async def _write_verified(
        self, verified: target_pb2.DecodeVerified, feed: SessionFeed | None
    ) -> None:
        verified.drafting = feed is not None and feed.drafting
        await self._write(target_pb2.DecodeResponse(verified=verified))

    async def _write(self, response: target_pb2.DecodeResponse) -> None:
        await self._context.write(response)


def _require_no_verify(request: Any) -> None:
    if request is not EOF and request.WhichOneof("message") == "verify":
        raise Conflict(f"verify.round {request.verify.round} given while steps are to come")


def _verified(round_: int, outcome: Outcome) -> target_pb2.DecodeVerified:
    return target_pb2.DecodeVerified(
        round=round_,
        accepted=outcome.accepted,
        bonus_token_id=outcome.committed[-1],
        timings=phase_timings(outcome),
        logprobs=[logprobs.to_proto() for logprobs in outcome.logprobs],
    )
