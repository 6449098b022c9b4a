"""What tests of the draft service share: a tiny pair's engine, and contexts for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.checkpoint import load_drafter
from draft_service.context import ContextKV
from draft_service.engine import Engine
from draft_service.target_tensors import load_target_tensors
from draft_service.work import IngestWork, ProposeWork
from flashduet.sampling.params import Sampling


def engine_of(drafter: Path, target: Path, *, tied: bool = True) -> Engine:
    """A float32 engine on the CPU."""
    return Engine(load_drafter(drafter), load_target_tensors(target, tied=tied))


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
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

    context: ContextKV
    features: torch.Tensor

    @classmethod
    def of(cls, engine: Engine, rows: int, seed: int = 0) -> Sequence:
        sequence = cls(engine.new_context(), features_for(engine, rows, seed))
        if rows:
            engine.step([IngestWork(sequence.context, 0, sequence.features)], [])
        return sequence

    def proposal(
        self, anchor_token_id: int, block_length: int, sampling: Sampling | None = None
    ) -> ProposeWork:
        return ProposeWork(
            self.context,
            len(self.features),
            anchor_token_id,
            block_length,
            sampling or Sampling(),
            choice=0,
        )
