"""A toy target: a real grpc.aio server around a model that is one hash.

It follows the proto as the real service does, and can be slow, refuse or die on command.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from flashduet import rpc
from flashduet.errors import FlashduetError, InvalidRequest
from flashduet.v1 import target_pb2
from flashduet.v1.common_pb2 import ModelFacts, PhaseTimings
from flashduet.v1.target_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from tests.support.tiny import IM_END, VOCAB_SIZE
from tests.unit.toy_model import CONTEXT_WINDOW, ToySession, set_event, toy_logprobs, toy_token

if TYPE_CHECKING:
    from tests.unit.toy_draft import ToyDraft

MODEL = "toy"


@dataclass
class ToyTarget(TargetServiceServicer):
    """A target whose faults are attributes."""

    drafts: list[ToyDraft] = field(default_factory=list)
    # Answers with these tokens after the prompt instead of the hash.
    script: list[int] | None = None
    open_delay_s: float = 0.0
    verify_delay_s: float = 0.0
    # Rounds wait while it is not set.
    may_verify: asyncio.Event = field(default_factory=set_event)
    refusal: FlashduetError | None = None
    # From this round on features no longer reach the draft, or the stream breaks.
    context_lost_at: int | None = None
    dies_at: int | None = None
    # Of each choice.
    cached_tokens: list[int] = field(default_factory=lambda: [0])
    facts_name: str = MODEL
    tokenizer_hash: str = ""
    sessions: dict[bytes, ToySession] = field(default_factory=dict)
    openings: list[target_pb2.DecodeOpen] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    verified_lengths: list[int] = field(default_factory=list)
    # What went wrong here or in a toy draft, not by command; the stack raises it at its end.
    mistakes: list[Exception] = field(default_factory=list)
    # Messages that asked for rounds; a target of an earlier release gives all steps together.
    verifies: list[target_pb2.DecodeVerify] = field(default_factory=list)
    knows_one_by_one: bool = True
    instance_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def next_token(self, session: ToySession) -> int:
        answered = len(session.ids) - session.prompt_length
        if self.script is not None:
            return self.script[answered] if answered < len(self.script) else IM_END
        return toy_token(session.ids, session.sampling, session.choice)

    def expect(self, session: ToySession, count: int) -> list[int]:
        """The next `count` tokens, without committing them."""
        ahead = ToySession(
            list(session.ids), session.prompt_length, session.sampling, False, session.choice
        )
        for _ in range(count):
            ahead.ids.append(self.next_token(ahead))
        return ahead.ids[len(session.ids) :]

    async def Decode(
        self,
        request_iterator: AsyncIterator[target_pb2.DecodeRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[target_pb2.DecodeResponse]:
        session_id = b""
        try:
            async for request in request_iterator:
                self.traceparents.append(request.traceparent)
                kind = request.WhichOneof("message")
                if kind == "open":
                    session_id = request.open.session_id
                    yield await self._open(request.open, context)
                elif kind == "verify":
                    async for response in self._rounds(session_id, request.verify, context):
                        yield response
                else:
                    self.sessions.pop(session_id, None)
                    yield target_pb2.DecodeResponse(closed=target_pb2.DecodeClosed())
        except (AssertionError, KeyError) as mistake:
            self.mistakes.append(mistake)
            raise
        finally:
            self.sessions.pop(session_id, None)

    async def _open(
        self, opening: target_pb2.DecodeOpen, context: grpc.aio.ServicerContext
    ) -> target_pb2.DecodeResponse:
        self.openings.append(opening)
        session = ToySession(
            list(opening.token_ids),
            opening.prompt_length,
            opening.sampling,
            opening.HasField("draft_instance_id"),
            opening.choice,
            opening.top_logprobs if opening.HasField("top_logprobs") else None,
            frozenset(opening.stop_token_ids),
        )
        self.sessions[opening.session_id] = session
        await asyncio.sleep(self.open_delay_s)
        if self.refusal is not None:
            await rpc.abort(context, self.refusal)
        first = self.next_token(session)
        session.ids.append(first)
        return target_pb2.DecodeResponse(
            opened=target_pb2.DecodeOpened(
                first_token_id=first,
                cached_tokens=self.cached_tokens[opening.choice % len(self.cached_tokens)],
                first_logprobs=next(iter(toy_logprobs([first], session.top_logprobs)), None),
                drafting=session.drafting,
                timings=PhaseTimings(queue_us=10, forward_us=1000, sample_us=100, publish_us=10),
                prefill_chunks=1,
            )
        )

    async def _rounds(
        self, session_id: bytes, verify: target_pb2.DecodeVerify, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.DecodeResponse]:
        self.verifies.append(target_pb2.DecodeVerify.FromString(verify.SerializeToString()))
        session, steps = self.sessions[session_id], 0
        if verify.one_by_one and self.knows_one_by_one:
            steps, verify.more_steps = verify.more_steps, 0
        yield await self._verify(session, verify, context)
        for step in range(1, steps + 1):
            if session.ids[-1] in session.stop_ids:
                return
            plain = target_pb2.DecodeVerify(round=verify.round + step, base=len(session.ids) - 1)
            yield await self._verify(session, plain, context)

    async def _verify(
        self,
        session: ToySession,
        verify: target_pb2.DecodeVerify,
        context: grpc.aio.ServicerContext,
    ) -> target_pb2.DecodeResponse:
        assert verify.base == len(session.ids) - 1, "base must be the anchor's position"
        if verify.token_ids and max(verify.token_ids) >= VOCAB_SIZE:
            await rpc.abort(context, InvalidRequest("token_ids", "an id", "outside the vocabulary"))
        self.verified_lengths.append(len(verify.token_ids) + 1)
        await self.may_verify.wait()
        await asyncio.sleep(self.verify_delay_s)
        if self.dies_at is not None and verify.round >= self.dies_at:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        wanted = self.expect(session, len(verify.token_ids) + 1)
        accepted = 0
        while accepted < len(verify.token_ids) and verify.token_ids[accepted] == wanted[accepted]:
            accepted += 1
        session.ids += wanted[: accepted + 1]
        more: list[int] = []
        while len(more) < verify.more_steps and session.ids[-1] not in session.stop_ids:
            more.append(self.next_token(session))
            session.ids.append(more[-1])
        if self.context_lost_at is not None and verify.round >= self.context_lost_at:
            session.drafting = False
        return target_pb2.DecodeResponse(
            verified=target_pb2.DecodeVerified(
                round=verify.round,
                accepted=accepted,
                bonus_token_id=wanted[accepted],
                more_token_ids=more,
                logprobs=toy_logprobs([*wanted[: accepted + 1], *more], session.top_logprobs),
                drafting=session.drafting,
                timings=PhaseTimings(queue_us=10, forward_us=1000, sample_us=100, publish_us=10),
            )
        )

    def facts(self) -> ModelFacts:
        return ModelFacts(
            name=self.facts_name,
            model_type="llama",
            hidden_size=64,
            num_layers=4,
            vocab_size=VOCAB_SIZE,
            tokenizer_hash=self.tokenizer_hash,
            context_window=CONTEXT_WINDOW,
        )

    async def GetModelInfo(
        self, request: object, context: object
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(
            instance_id=self.instance_id,
            protocol_version=1,
            facts=self.facts(),
            max_sessions=16,
            max_block_length=32,
            max_top_logprobs=20,
            device="cpu",
            drafts=[target_pb2.AttachedDraft(instance_id=d.instance_id) for d in self.drafts],
        )


async def serve_target(target: ToyTarget, listen: str = "127.0.0.1:0") -> rpc.Server:
    server = rpc.Server(["flashduet.v1.TargetService"])
    add_TargetServiceServicer_to_server(target, server.grpc)
    await server.start(listen)
    await server.serving()
    return server
