"""What tests of the draft service share: a tiny pair's engine, and contexts for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.checkpoint import load_checkpoint
from draft_service.context import ContextPlan
from draft_service.context_pool import ContextPool, HeldContext
from draft_service.draft_vocabulary import assemble
from draft_service.engine import Engine
from draft_service.network import KeysValues
from draft_service.shortlist import read_shortlist
from draft_service.target_tensors import load_target_tensors
from draft_service.work import IngestWork, ProposeWork
from flashduet.sampling.params import Sampling

# What takes milliseconds on an idle machine has this long.
WAIT_S = 60.0


class DraftingEngine(Engine):
    """An engine with the pool of its blocks at hand, and work for it in few words."""

    def __init__(self, *parts: object, **more: object) -> None:
        super().__init__(*parts, **more)  # type: ignore[arg-type]
        self.pool = ContextPool(self.plan)

    def new_context(self) -> HeldContext:
        return self.pool.open()

    def ingest_work(self, held: HeldContext, base: int, features: torch.Tensor) -> IngestWork:
        """Rows for a context. They are written only when the work is stepped."""
        held.end = max(held.end, base + len(features))
        assert self.pool.has_room(held, 0)
        token_ids = [7] * len(features)
        return IngestWork(held.engine, base, token_ids, features, tuple(held.table.block_ids))

    def ingest(self, held: HeldContext, base: int, features: torch.Tensor) -> None:
        self.step([self.ingest_work(held, base, features)], [])

    def proposal(
        self,
        held: HeldContext,
        anchor_position: int,
        anchor_token_id: int = 5,
        block_length: int = 8,
        sampling: Sampling | None = None,
        choice: int = 0,
    ) -> ProposeWork:
        block_ids = self.pool.blocks_for(held, block_length)
        return ProposeWork(
            held.engine,
            anchor_position,
            anchor_token_id,
            block_length,
            sampling or Sampling(),
            choice,
            block_ids,
        )

    def rows(self, held: HeldContext) -> KeysValues:
        """Written rows [layers, kv_heads, length, head_dim]; copies."""
        return self.store.rows(held.table.block_ids, held.engine.length)


def engine_of(
    drafter: Path,
    target: Path,
    *,
    tied: bool = True,
    plan: ContextPlan | None = None,
    lookup: int = 0,
) -> DraftingEngine:
    """A float32 engine on the CPU."""
    plan = plan or ContextPlan(rows=1 << 16)
    checkpoint = load_checkpoint(drafter)
    tensors = load_target_tensors(target, tied=tied)
    shortlist = read_shortlist(drafter, len(tensors.embedding))
    vocabulary = assemble(tensors, checkpoint.own, shortlist)
    return DraftingEngine(checkpoint.network, vocabulary, plan, lookup)


async def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Let the event loop run until `condition` holds; fails after `seconds`."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about in time")


def features_for(engine: Engine, rows: int, seed: int = 0) -> torch.Tensor:
    """Random context features [rows, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, engine.config.feature_width, generator=generator)


@dataclass(frozen=True)
class Sequence:
    """A context and the features that it was made of."""

    engine: DraftingEngine
    context: HeldContext
    features: torch.Tensor

    @classmethod
    def of(cls, engine: DraftingEngine, rows: int, seed: int = 0) -> Sequence:
        return cls.made_of(engine, features_for(engine, rows, seed))

    @classmethod
    def made_of(cls, engine: DraftingEngine, features: torch.Tensor) -> Sequence:
        sequence = cls(engine, engine.new_context(), features)
        if len(features):
            engine.ingest(sequence.context, 0, features)
        return sequence

    def proposal(
        self,
        anchor_token_id: int,
        block_length: int,
        sampling: Sampling | None = None,
        choice: int = 0,
    ) -> ProposeWork:
        return self.engine.proposal(
            self.context, len(self.features), anchor_token_id, block_length, sampling, choice
        )
