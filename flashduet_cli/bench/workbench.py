"""What the rows measure with: stacks, clients and probes, started when first asked for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from flashduet.client import AsyncClient, GenerateOptions, Generation, Prompt
from flashduet.rpc import open_channel
from flashduet.sampling.params import Sampling
from flashduet.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from flashduet_cli.bench.probe import Probe
from flashduet_cli.bench.prompts import Prompts
from flashduet_cli.console import note
from flashduet_cli.stack import Stack
from flashduet_cli.stack_config import StackConfig

Kind = Literal["fast", "exact", "invariant"]

REQUEST_TIMEOUT_S = 600.0
_LOAD_TIMEOUT_S = 10.0
# Room for a batch of 64 and what else is asked at the same time.
_ROOM = {
    "FLASHDUET_TARGET_MAX_SESSIONS": "80",
    "FLASHDUET_TARGET_MAX_KV_TOKENS": "65536",
    "FLASHDUET_DRAFT_MAX_SESSIONS": "80",
    "FLASHDUET_GATEWAY_MAX_REQUESTS": "96",
}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured.

    Attributes:
        config: of every stack; its dtype is that of the rows that do not say another.
        folder: of the target's checkpoint.
        prompts: as token ids.
        quick: few and short samples: tells that a row works, not what the figure is.
    """

    config: StackConfig
    folder: Path
    prompts: Prompts
    quick: bool
    verbose: bool = False

    @property
    def dtype(self) -> str:
        return self.config.dtype or "bfloat16"

    @property
    def threads(self) -> int:
        """0: all cores."""
        return self.config.threads or 0

    def count(self, full: int, quick: int) -> int:
        """How many samples or tokens: `full`, or `quick` in a quick run."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Running:
    """One stack and the ways to talk to it."""

    stack: Stack
    client: AsyncClient
    target: target_pb2_grpc.TargetServiceStub
    draft: draft_pb2_grpc.DraftServiceStub | None

    async def ask(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """One whole answer, greedy and of exactly `max_tokens` where nothing else is said.

        A salt of its own keeps it from finding an earlier one's work again.
        """
        asked: GenerateOptions = {
            "sampling": Sampling(),
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(8),
            "timeout": REQUEST_TIMEOUT_S,
        }
        asked.update(options)
        return await self.client.generate(prompt, **asked).result()

    async def target_load(self) -> target_pb2.TargetServiceGetLoadResponse:
        request = target_pb2.TargetServiceGetLoadRequest()
        return await self.target.GetLoad(request, timeout=_LOAD_TIMEOUT_S)

    async def draft_load(self) -> draft_pb2.DraftServiceGetLoadResponse | None:
        if self.draft is None:
            return None
        request = draft_pb2.DraftServiceGetLoadRequest()
        return await self.draft.GetLoad(request, timeout=_LOAD_TIMEOUT_S)


class Workbench:
    """Owns every process that the rows start; they end with it, or before when told so."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self._exits: dict[str, AsyncExitStack] = {}
        self._held: dict[str, Any] = {}
        # Seconds from a start to the stack's readiness, of each start of the fast stack.
        self.starts: list[float] = []

    async def stack(self, kind: Kind) -> Running:
        """The stack of a kind: `fast`, float32 (`exact`), or with batch-invariant numerics."""
        if kind in self._held:
            return self._held[kind]  # type: ignore[no-any-return]
        config = _config(self.settings.config, kind)
        note(f"starting the {kind} stack")
        exits = AsyncExitStack()
        stack = Stack(config, log=_log if self.settings.verbose else _quiet, event=_quiet)
        started = time.perf_counter()
        await exits.enter_async_context(stack)
        if kind == "fast":
            self.starts.append(time.perf_counter() - started)
        client = await exits.enter_async_context(AsyncClient(stack.endpoint))
        to_target = await exits.enter_async_context(open_channel(stack.target_endpoint))
        draft = None
        if config.draft:
            to_draft = await exits.enter_async_context(open_channel(stack.draft_endpoint))
            draft = draft_pb2_grpc.DraftServiceStub(to_draft)
        running = Running(stack, client, target_pb2_grpc.TargetServiceStub(to_target), draft)
        self._hold(kind, running, exits)
        return running

    async def transformers(self) -> Probe:
        """Transformers itself, with the bench's dtype and threads, warm."""
        probe, new = await self._probe("transformers_peer", like_service=False)
        if new:
            settings = self.settings
            threads = await probe.ask(
                "load", folder=str(settings.folder), dtype=settings.dtype, threads=settings.threads
            )
            note(f"Transformers is loaded, {threads} threads")
            await probe.ask("generate", prompts=[settings.prompts.text(16)], max_tokens=4)
        return probe

    async def draft_engine(self) -> Probe:
        """The draft engine in process, warm."""
        return (await self._draft())[0]

    async def target_engine(self) -> Probe:
        """The target engine in process, warm; it captures the layers that the drafter reads."""
        probe, new = await self._probe("target")
        if new:
            layers = (await self._draft())[1]["layer_ids"]
            settings = self.settings
            await probe.ask(
                "load",
                model=str(settings.folder),
                dtype=settings.dtype,
                threads=settings.threads,
                layer_ids=layers,
            )
        return probe

    async def drafter_facts(self) -> Mapping[str, Any]:
        """What the draft engine says of itself: block_length, bytes of a feature row, ..."""
        return (await self._draft())[1]

    async def transport(self) -> Probe:
        """Two processes that pass tensors, not started yet."""
        return (await self._probe("transport"))[0]

    async def keep_only(self, names: Sequence[str]) -> None:
        """End every process but these, so that none takes memory or time from a row."""
        await self.close(*(name for name in self._exits if name not in names))

    async def close(self, *names: str) -> None:
        """End these; those that do not run are passed over."""
        for name in names:
            self._held.pop(name, None)
            if exits := self._exits.pop(name, None):
                await exits.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(*self._exits)

    async def _draft(self) -> tuple[Probe, Mapping[str, Any]]:
        probe, new = await self._probe("draft")
        if new:
            settings = self.settings
            self._held["draft facts"] = await probe.ask(
                "load",
                drafter=settings.config.drafter or "default",
                model=str(settings.folder),
                dtype=settings.dtype,
                threads=settings.threads,
            )
        return probe, self._held["draft facts"]

    async def _probe(self, name: str, *, like_service: bool = True) -> tuple[Probe, bool]:
        if name in self._held:
            return self._held[name], False
        note(f"starting the probe {name}")
        exits = AsyncExitStack()
        threads = self.settings.config.threads
        probe = await exits.enter_async_context(
            Probe(name, like_service=like_service, threads=threads)
        )
        self._hold(name, probe, exits)
        return probe, True

    def _hold(self, name: str, thing: object, exits: AsyncExitStack) -> None:
        self._held[name], self._exits[name] = thing, exits


def _config(base: StackConfig, kind: Kind) -> StackConfig:
    room = {**_ROOM, **base.env}
    if kind == "exact":
        return replace(base, dtype="float32", env=room)
    if kind == "invariant":
        return replace(base, env={**room, "FLASHDUET_TARGET_NUMERICS": "batch_invariant"})
    return replace(base, env=room)


def _quiet(service: str, line: str) -> None:
    """A line that nobody asked for; a failed start still shows the last ones."""


def _log(service: str, line: str) -> None:
    note(f"{service:<7} | {line}")
