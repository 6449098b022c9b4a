"""One Propose stream: a gateway's messages in, answers out.

The stream owns the sessions that it opens; `close` frees them, however the stream ends.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.context import Context

from draft_service import wire
from draft_service.coordinator import Coordinator
from draft_service.messages import BlockDrafted
from draft_service.refusals import ProposalRefused
from draft_service.sessions import Owner
from flashduet import telemetry
from flashduet.v1 import draft_pb2

# Answers that a gateway has not read yet; past this its messages are not read either.
MAX_UNREAD = 256
FLUSH_S = 2.0

log = logging.getLogger(__name__)


class ProposeStream:
    """Translates between one stream and the coordinator."""

    def __init__(self, coordinator: Coordinator, context: grpc.aio.ServicerContext) -> None:
        self._coordinator = coordinator
        self._owner = Owner()
        self._outbox = _Outbox(context)

    async def handle(self, request: draft_pb2.ProposeRequest) -> None:
        """Follow one message; refusals are answered and counted, and end nothing."""
        round = request.block.round if request.WhichOneof("message") == "block" else 0
        try:
            self._follow(request)
        except ProposalRefused as refusal:
            self._refuse(request, round, refusal)
        except Exception:  # a defect of ours must cost one message, not the gateway's sessions
            log.exception("a message could not be followed")
            self._refuse(request, round, ProposalRefused("INTERNAL", "see the service's log"))
        await self._outbox.room()

    async def close(self) -> None:
        """Free the stream's sessions and write what is still to be said."""
        self._coordinator.close_owner(self._owner)
        await self._outbox.close()

    def _follow(self, request: draft_pb2.ProposeRequest) -> None:
        key = (self._owner, request.session_id, request.epoch)
        match request.WhichOneof("message"):
            case "open":
                self._open(request)
            case "block":
                self._propose(request)
            case "rewind":
                end = self._coordinator.rewind(
                    *key, request.rewind.length, request.rewind.new_epoch
                )
                rewound = draft_pb2.ProposeRewound(context_end=end)
                epoch = request.rewind.new_epoch
                self._send(request, draft_pb2.ProposeResponse(epoch=epoch, rewound=rewound))
            case "cancel":
                self._coordinator.cancel(*key, request.cancel.round)
            case "heartbeat":
                self._coordinator.heartbeat(*key)
            case "close":
                self._coordinator.close(*key)
                self._send(request, draft_pb2.ProposeResponse(closed=draft_pb2.ProposeClosed()))
            case _:
                raise ProposalRefused("BAD_REQUEST", "a message without content")

    def _open(self, request: draft_pb2.ProposeRequest) -> None:
        wire.require_session_id(request.session_id)
        hit = self._coordinator.open(
            self._owner,
            request.session_id,
            request.epoch,
            wire.session_terms(request.open),
            request.open.token_ids,
        )
        lease_ms = int(self._coordinator.limits.lease_s * 1000)
        opened = draft_pb2.ProposeOpened(context_hit=hit, lease_ms=lease_ms)
        self._send(request, draft_pb2.ProposeResponse(opened=opened))

    def _propose(self, request: draft_pb2.ProposeRequest) -> None:
        span = _start_span(request)
        block = wire.block_request(request.block, _context_of(span))

        def answer(outcome: BlockDrafted | ProposalRefused | None) -> None:
            if isinstance(outcome, BlockDrafted):
                proposal = wire.proposal(block.round, outcome)
                self._send(request, draft_pb2.ProposeResponse(proposal=proposal))
            elif outcome is not None:
                self._refuse(request, block.round, outcome)
            if span is not None:
                span.set_attribute("outcome", wire.outcome_name(outcome))
                span.end()

        try:
            self._coordinator.propose(self._owner, request.session_id, request.epoch, block, answer)
        except ProposalRefused as refusal:
            answer(refusal)

    def _refuse(
        self, request: draft_pb2.ProposeRequest, round: int, refusal: ProposalRefused
    ) -> None:
        self._coordinator.refused_proposals.add(refusal.reason)
        refused = wire.refused(round, refusal)
        self._send(request, draft_pb2.ProposeResponse(refused=refused))

    def _send(self, request: draft_pb2.ProposeRequest, response: draft_pb2.ProposeResponse) -> None:
        """`response` for the request's session; in the request's epoch unless it names another."""
        response.session_id = request.session_id
        response.epoch = response.epoch or request.epoch
        self._outbox.put(response)


class _Outbox:
    """Answers of one stream, written in order by one task."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._queue: asyncio.Queue[draft_pb2.ProposeResponse | None] = asyncio.Queue()
        self._written = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    def put(self, response: draft_pb2.ProposeResponse) -> None:
        self._queue.put_nowait(response)

    async def room(self) -> None:
        """Wait while the other side does not read its answers."""
        while self._queue.qsize() > MAX_UNREAD and not self._writer.done():
            self._written.clear()
            await self._written.wait()

    async def close(self) -> None:
        """Write what is left, if that goes quickly, and end."""
        self._queue.put_nowait(None)
        # Waiting for a task, unlike awaiting it, mistakes no cancellation of ours for its own.
        await asyncio.wait({self._writer}, timeout=FLUSH_S)
        self._writer.cancel()

    async def _write(self) -> None:
        try:
            while (response := await self._queue.get()) is not None:
                await self._context.write(response)
                self._written.set()
        except (grpc.RpcError, grpc.aio.InternalError):
            pass  # The stream is over, and with it whoever would read.
        finally:
            self._written.set()


def _start_span(request: draft_pb2.ProposeRequest) -> trace.Span | None:
    parent = telemetry.context_of(request.traceparent)
    if parent is None:
        return None
    attributes: dict[str, str | int] = {
        "session": request.session_id.hex(),
        "epoch": request.epoch,
        "round": request.block.round,
        "base": max(0, request.block.committed_length - 1),
        "tokens": request.block.block_length,
    }
    return telemetry.tracer().start_span("draft.propose", context=parent, attributes=attributes)


def _context_of(span: trace.Span | None) -> Context | None:
    return None if span is None else trace.set_span_in_context(span, Context())
