"""A toy pair for the gateway's tests: real grpc.aio servers around a model that is one hash.

They follow the protos as the real services do, and can be slow, refuse, stay silent or die on
command. What features are in reality, the draft reads from the target's sessions here.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from flashduet import rpc
from flashduet.errors import FlashduetError, InvalidRequest
from flashduet.v1 import draft_pb2, gateway_pb2, target_pb2
from flashduet.v1.common_pb2 import (
    ModelFacts,
    PhaseTimings,
    PositionLogprobs,
    SamplingParams,
    TokenLogprob,
)
from flashduet.v1.draft_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server
from flashduet.v1.gateway_pb2_grpc import (
    GatewayServiceStub,
    add_GatewayServiceServicer_to_server,
)
from flashduet.v1.target_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from gateway.gateway import Gateway
from gateway.router import Router
from gateway.server import SERVICE, GatewayServicer
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenizer
from tests.support.tiny import IM_END, SPECIALS, VOCAB_SIZE, tiny_tokenizer

Write = Callable[[draft_pb2.ProposeResponse], Awaitable[None]]

# What takes milliseconds on an idle machine has this long, and what never comes takes longer.
WAIT_S = 60.0
FOR_EVER_S = 3600.0
PATIENCE = {"draft_budget_floor_ms": 20_000, "draft_budget_ceiling_ms": 20_000}

BLOCK_LENGTH = 8
CONTEXT_WINDOW = 512
MODEL = "toy"


def tokenizer_folder(folder: Path) -> Path:
    """The tiny byte-level tokenizer, ending at <|im_end|>."""
    tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END}))
    return folder


def ids_of(text: str) -> list[int]:
    """One token a byte, as the tiny tokenizer has them (no merges)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    order = {c: i for i, c in enumerate(sorted(characters.values()))}
    return [len(SPECIALS) + order[characters[byte]] for byte in text.encode()]


def toy_token(ids: Sequence[int], sampling: SamplingParams, choice: int = 0) -> int:
    """The toy model: a byte token that depends on the last ids, the position and the noise key."""
    key = [*ids[-3:], len(ids)]
    if sampling.temperature > 0:
        key += [sampling.seed & 0xFFFFFFFF, sampling.seed >> 32, choice]
    return len(SPECIALS) + zlib.crc32(repr(key).encode()) % 256


def plain_answer(
    prompt: Sequence[int], tokens: int, seed: int | None = None, choice: int = 0
) -> list[int]:
    """What the toy target alone says."""
    sampling = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed or 0)
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(toy_token(ids, sampling, choice))
    return ids[len(prompt) :]


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class ToySession:
    ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    drafting: bool
    choice: int = 0
    top_logprobs: int | None = None
    stop_ids: frozenset[int] = frozenset()


def toy_logprobs(ids: Sequence[int], top_logprobs: int | None) -> list[PositionLogprobs]:
    """What the toy target tells: -1/2 for what it chose, then ever less likely special tokens."""
    if top_logprobs is None:
        return []
    top = [TokenLogprob(token_id=i, logprob=-1.0 - i) for i in range(top_logprobs)]
    return [
        PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.5), top=top)
        for token_id in ids
    ]


@dataclass
class ToyTarget(TargetServiceServicer):
    """A target whose faults are attributes."""

    drafts: list[ToyDraft] = field(default_factory=list)
    # Answers with these tokens after the prompt instead of the hash.
    script: list[int] | None = None
    open_delay_s: float = 0.0
    verify_delay_s: float = 0.0
    # Rounds wait while it is not set.
    may_verify: asyncio.Event = field(default_factory=_set_event)
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


@dataclass
class ToyDraft(DraftServiceServicer):
    """A draft that is right but for every `wrong_every`-th position; faults are attributes."""

    target: ToyTarget
    wrong_every: int = 5
    delay_s: float = 0.0
    # Answers wait while it is not set.
    may_answer: asyncio.Event = field(default_factory=_set_event)
    # Says nothing any more, like a stopped process; from this round on.
    frozen: bool = False
    freezes_at: int | None = None
    refuses: draft_pb2.RefusalReason | None = None
    refuses_opens: bool = False
    # Given instead of real drafts.
    nonsense: list[int] | None = None
    dies_at: int | None = None
    lease_ms: int = 30_000
    context_hit: int = 0
    self_test: draft_pb2.SelfTest | None = None
    openings: list[draft_pb2.ProposeOpen] = field(default_factory=list)
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
                await context.write(response)

        self.streams += 1
        try:
            async for request in request_iterator:
                kind = request.WhichOneof("message")
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
        session = self.target.sessions[request.session_id]
        assert block.committed_length == len(session.ids)
        assert block.anchor_token_id == session.ids[-1]
        drafts = self.target.expect(session, block.block_length - 1)
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
        )
        await write(_to(request, proposal=proposal))

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


async def serve_target(target: ToyTarget, listen: str = "127.0.0.1:0") -> rpc.Server:
    server = rpc.Server(["flashduet.v1.TargetService"])
    add_TargetServiceServicer_to_server(target, server.grpc)
    await server.start(listen)
    await server.serving()
    return server


async def serve_draft(draft: ToyDraft, listen: str = "127.0.0.1:0") -> rpc.Server:
    server = rpc.Server(["flashduet.v1.DraftService"])
    add_DraftServiceServicer_to_server(draft, server.grpc)
    await server.start(listen)
    await server.serving()
    return server


async def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until it holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < WAIT_S, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.005)


@dataclass
class ToyStack:
    """The toy pair behind a real gateway, all in this process, all over real gRPC."""

    target: ToyTarget
    draft: ToyDraft
    gateway: Gateway
    router: Router
    stub: GatewayServiceStub
    draft_server: rpc.Server
    target_server: rpc.Server
    channel: grpc.aio.Channel

    async def generate(
        self, request: gateway_pb2.GenerateRequest, **call: object
    ) -> GeneratedAnswer:
        answer = GeneratedAnswer()
        async for response in self.stub.Generate(request, **call):  # type: ignore[arg-type]
            answer.add(response)
        return answer

    async def kill_draft(self) -> None:
        await self.draft_server.grpc.stop(None)
        self.target.drafts.clear()

    async def restart_draft(self, **attributes: object) -> None:
        """A new process at the same address: another instance id, no sessions."""
        self.draft = ToyDraft(self.target, **attributes)  # type: ignore[arg-type]
        self.draft_server = await serve_draft(self.draft, f"127.0.0.1:{self.draft_server.port}")
        self.target.drafts[:] = [self.draft]
        await self.drafted()

    async def drafted(self) -> None:
        """Wait until the gateway would draft a new request."""

        def drafted() -> bool:
            draft = self.router.route(drafted=True).draft
            return draft is not None and draft.info.instance_id == self.draft.instance_id

        await until(drafted, what="draft")

    async def all_free(self) -> None:
        """Wait until nothing of any request is left anywhere."""
        await until(
            lambda: not (self.target.sessions or self.draft.sessions or self.gateway.counts.active),
            "all to be free",
        )


@dataclass
class GeneratedAnswer:
    """A stream of responses put together; checks their order."""

    started: gateway_pb2.GenerateStarted | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # By choice; `texts` and `token_ids` are the first one's.
    chunks: dict[int, list[gateway_pb2.GenerateChunk]] = field(default_factory=dict)
    finished: dict[int, gateway_pb2.GenerateFinished] = field(default_factory=dict)
    complete: gateway_pb2.GenerateComplete | None = None

    def add(self, response: gateway_pb2.GenerateResponse) -> None:
        kind = response.WhichOneof("message")
        assert self.complete is None, "nothing follows Complete"
        assert (kind == "started") == (self.started is None), "Started comes first, once"
        if kind == "started":
            self.started = response.started
        elif kind == "chunk":
            choice = response.chunk.choice
            assert choice not in self.finished, "nothing of an answer follows its Finished"
            self.chunks.setdefault(choice, []).append(response.chunk)
            if choice == 0:
                self.texts.append(response.chunk.text)
                self.token_ids += response.chunk.token_ids
        elif kind == "finished":
            assert response.finished.choice not in self.finished, "each answer finishes once"
            self.finished[response.finished.choice] = response.finished
        else:
            assert self.finished.keys() == self.chunks.keys(), "every answer has finished"
            self.complete = response.complete

    def ids(self, choice: int) -> list[int]:
        return [token_id for chunk in self.chunks[choice] for token_id in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def stats(self) -> gateway_pb2.SpeculationStats:
        assert self.complete is not None
        return self.complete.speculation

    @property
    def undrafted(self) -> dict[str, int]:
        return {item.reason: item.count for item in self.stats.undrafted_rounds}


@asynccontextmanager
async def toy_stack(
    tokenizer: Tokenizer, *, lease_ms: int = 30_000, **overrides: object
) -> AsyncIterator[ToyStack]:
    """Everything up and drafting; settings of the gateway may be given.

    A draft is waited for long, where a test does not say otherwise.
    """
    target = ToyTarget()
    draft = ToyDraft(target, lease_ms=lease_ms)
    target.drafts.append(draft)
    target_server, draft_server = await serve_target(target), await serve_draft(draft)
    settings = GatewaySettings.load(
        **{
            "targets": f"127.0.0.1:{target_server.port}",
            "drafts": f"127.0.0.1:{draft_server.port}",
            "poll_s": 0.05,
            **PATIENCE,
            **overrides,
        }
    )
    router = Router(settings)
    watching = asyncio.create_task(router.run())
    gateway = Gateway(settings, router)
    gateway.tokenizer = tokenizer
    server = rpc.Server([SERVICE])
    add_GatewayServiceServicer_to_server(GatewayServicer(gateway), server.grpc)
    await server.start("127.0.0.1:0")
    await server.serving()
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    stack = ToyStack(
        target,
        draft,
        gateway,
        router,
        GatewayServiceStub(channel),
        draft_server,
        target_server,
        channel,
    )
    try:
        await until(lambda: gateway.served() is not None, what="target")
        if settings.drafts:
            await stack.drafted()
        yield stack
    finally:
        await channel.close()
        await server.stop(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await stack.draft_server.stop(0)
        await target_server.stop(0)


def ask(
    prompt: str | list[int] = "hello",
    *,
    max_tokens: int = 40,
    mode: str = "fixed",
    block_length: int | None = None,
    **fields: object,
) -> gateway_pb2.GenerateRequest:
    """A request; `mode` is fixed, auto or off."""
    request = gateway_pb2.GenerateRequest(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    request.speculation.mode = gateway_pb2.SpeculationMode.Value(f"SPECULATION_MODE_{mode.upper()}")
    if block_length is not None:
        request.speculation.block_length = block_length
    return request
