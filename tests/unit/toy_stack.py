"""The toy pair behind a real gateway, all in one process and all over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from flashduet import rpc
from flashduet.v1 import gateway_pb2
from flashduet.v1.gateway_pb2_grpc import GatewayServiceStub, add_GatewayServiceServicer_to_server
from gateway.gateway import Gateway
from gateway.router import Router
from gateway.server import SERVICE, GatewayServicer
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenizer
from tests.unit.toy_draft import ToyDraft, serve_draft
from tests.unit.toy_target import ToyTarget, serve_target

# What takes milliseconds on an idle machine has this long, and what never comes takes longer.
WAIT_S = 60.0

FOR_EVER_S = 3600.0

PATIENCE = {"draft_budget_floor_ms": 20_000, "draft_budget_ceiling_ms": 20_000}


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
    if target.mistakes:
        raise ExceptionGroup("the toy pair was used against its protocol", target.mistakes)


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
