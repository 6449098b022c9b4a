"""A toy draft: a real grpc.aio server that is slow, wrong, silent or dead on command.

What features are in reality, it reads from the toy target's sessions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import grpc.aio

from flashduet import rpc
from flashduet.v1 import draft_pb2
from flashduet.v1.common_pb2 import PhaseTimings
from flashduet.v1.draft_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server
from tests.support.tiny import VOCAB_SIZE
from tests.unit.toy_model import set_event
from tests.unit.toy_target import ToyTarget

Write = Callable[[draft_pb2.ProposeResponse], Awaitable[None]]

BLOCK_LENGTH = 8


@dataclass
class ToyDraft(DraftServiceServicer):
    """A draft that is right but for every `wrong_every`-th position; faults are attributes."""

    target: ToyTarget
    wrong_every: int = 5
    delay_s: float = 0.0
    # Answers wait while it is not set.
    may_answer: asyncio.Event = field(default_factory=set_event)
    # Says nothing any more, like a stopped process; from this round on.
    frozen: bool = False
    freezes_at: int | None = None
    refuses: draft_pb2.RefusalReason | None = None
    refuses_opens: bool = False
    # Says of so many of its last drafts that they are copied from the text.
    copies: int = 0
    # Given instead of real drafts.
    nonsense: list[int] | None = None
    dies_at: int | None = None
    lease_ms: int = 30_000
    context_hit: int = 0
    self_test: draft_pb2.SelfTest | None = None
    openings: list[draft_pb2.ProposeOpen] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    sessions: set[bytes] = field(default_factory=set)
    proposals: int = 0
    heartbeats: int = 0
    cancels: list[int] = field(default_factory=list)
    blocks: list[draft_pb2.ProposeBlock] = field(default_factory=list)
    streams: int = 0
    instance_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        owned: set[bytes] = set()
        tasks: set[asyncio.Task[None]] = set()
        writing = asyncio.Lock()

        async def write(response: draft_pb2.ProposeResponse) -> None:
            async with writing:
                try:
                    await context.write(response)
                except Exception:
                    if not context.done():
                        raise

        self.streams += 1
        try:
            async for request in request_iterator:
                kind = request.WhichOneof("message")
                self.traceparents.append(request.traceparent)
                if kind == "block" and self.freezes_at == request.block.round:
                    self.frozen = True
                if self.frozen:
                    continue
                if kind == "block":
                    if self.dies_at is not None and request.block.round >= self.dies_at:
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                    task = asyncio.create_task(self._answer(request, write))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    task.add_done_callback(self._blame)
                elif kind == "heartbeat":
                    self.heartbeats += 1
                elif kind == "cancel":
                    self.cancels.append(request.cancel.round)
                elif kind == "open":
                    await self._open(request, write, owned)
                elif kind == "close":
                    owned.discard(request.session_id)
                    self.sessions.discard(request.session_id)
                    await write(_to(request, closed=draft_pb2.ProposeClosed()))
        finally:
            self.streams -= 1
            self.sessions -= owned
            for task in tasks:
                task.cancel()

    async def _open(
        self,
        request: draft_pb2.ProposeRequest,
        write: Write,
        owned: set[bytes],
    ) -> None:
        if self.refuses_opens:
            refused = draft_pb2.ProposeRefused(
                reason=draft_pb2.REFUSAL_REASON_TOO_MANY_SESSIONS, round=0
            )
            await write(_to(request, refused=refused))
            return
        self.openings.append(request.open)
        owned.add(request.session_id)
        self.sessions.add(request.session_id)
        opened = draft_pb2.ProposeOpened(context_hit=self.context_hit, lease_ms=self.lease_ms)
        await write(_to(request, opened=opened))

    async def _answer(self, request: draft_pb2.ProposeRequest, write: Write) -> None:
        block = request.block
        self.blocks.append(block)
        assert request.session_id in self.sessions, "a block is asked for by who has opened"
        session = self.target.sessions.get(request.session_id)
        if session is None:
            # The target was told first that the request has ended; nobody waits for this.
            return
        # Who did not wait for this block may have committed more since.
        ids = session.ids[: block.committed_length]
        assert (len(ids), ids[-1]) == (block.committed_length, block.anchor_token_id)
        drafts = self.target.expect(replace(session, ids=ids), block.block_length - 1)
        for index in range(len(drafts)):
            if (block.committed_length + index) % self.wrong_every == 0:
                drafts[index] = (drafts[index] + 1) % VOCAB_SIZE
        if self.nonsense is not None:
            drafts = self.nonsense
        await self.may_answer.wait()
        await asyncio.sleep(self.delay_s)
        if self.refuses is not None:
            refused = draft_pb2.ProposeRefused(reason=self.refuses, round=block.round)
            await write(_to(request, refused=refused))
            return
        self.proposals += 1
        proposal = draft_pb2.Proposal(
            round=block.round,
            token_ids=drafts,
            confidence=[0.5] * len(drafts),
            timings=PhaseTimings(queue_us=5, forward_us=200, sample_us=20),
            copied_tokens=min(self.copies, len(drafts)),
        )
        await write(_to(request, proposal=proposal))

    def _blame(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.target.mistakes.append(error)

    async def GetModelInfo(
        self, request: object, context: object
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(
            instance_id=self.instance_id,
            protocol_version=1,
            name="toy-drafter",
            target_facts=self.target.facts(),
            block_length=BLOCK_LENGTH,
            max_block_length=16,
            max_sessions=32,
            lease_ms=self.lease_ms,
            self_test=self.self_test,
        )


def _to(request: draft_pb2.ProposeRequest, **message: object) -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(
        session_id=request.session_id,
        epoch=request.epoch,
        **message,  # type: ignore[arg-type]
    )


async def serve_draft(draft: ToyDraft, listen: str = "127.0.0.1:0") -> rpc.Server:
    server = rpc.Server(["flashduet.v1.DraftService"])
    add_DraftServiceServicer_to_server(draft, server.grpc)
    await server.start(listen)
    await server.serving()
    return server
