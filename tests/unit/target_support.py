"""What the target service's tests share: loaded tiny targets and sessions on them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flashduet.kv.blocks import BlockPool, BlockTable
from flashduet.sampling.params import Sampling
from target_service.batching import Span
from target_service.engine import Engine
from target_service.load import LoadedTarget, load_target
from target_service.session import PrefillChunk, Session, StepResult, VerifyBlock
from target_service.settings import TargetSettings
from tests.support.tiny import VOCAB_SIZE, tiny_target

# Without and with windows, softcap, experts and learned positions; test_families has them all.
FAMILIES = ["llama", "gemma2", "gpt_oss"]

BLOCKS, BLOCK_TOKENS = 512, 16


@dataclass(frozen=True)
class TinyTarget:
    """A packed engine, and the same model as Transformers loads it."""

    folder: Path
    target: LoadedTarget
    engine: Engine
    stock: nn.Module
    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS, BLOCK_TOKENS))

    def table(self, room: int, *, scattered: bool = False) -> BlockTable:
        """Blocks for `room` positions; scattered ones have no two neighbours in order."""
        table = BlockTable()
        assert self.pool.reserve(table, room)
        if scattered:
            table.block_ids.reverse()
        return table

    def session(
        self, tokens: list[int], *, room: int = 256, scattered: bool = False, **fields: Any
    ) -> Session:
        defaults = {
            "session_id": os.urandom(16),
            "epoch": 0,
            "choice": 0,
            "sampling": Sampling(),
            "table": self.table(room, scattered=scattered),
            "token_limit": room,
            "prompt_length": len(tokens),
            "token_ids": list(tokens),
        }
        return Session(**(defaults | fields))

    @torch.inference_mode()
    def logits(self, session: Session, base: int, tokens: list[int]) -> Tensor:
        """All logits [n, V] of one packed pass over tokens at base..; the table grows by them."""
        assert session.table.length == base
        span = Span(session.table.block_ids, base, tokens)
        result = self.engine.packed.forward(self.engine.kv, [span], torch.arange(len(tokens)))
        session.table.length = span.end
        return result

    @torch.inference_mode()
    def reference(self, tokens: list[int]) -> Any:
        """The stock model's own output for the whole sequence at once, without any cache."""
        ids = torch.tensor([tokens])
        return self.stock(ids, use_cache=False, output_hidden_states=True)

    @torch.inference_mode()
    def generate(self, tokens: list[int], count: int) -> list[int]:
        """Transformers' own greedy continuation."""
        output = self.stock.generate(  # type: ignore[operator]
            torch.tensor([tokens]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def load_tiny(folder: Path, family: str = "llama", **overrides: Any) -> TinyTarget:
    tiny_target(folder, family, **overrides)
    target = load_target(TargetSettings(model=str(folder), device="cpu", dtype="float32"))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return TinyTarget(folder, target, Engine(target, BLOCKS, BLOCK_TOKENS), stock)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()


def run_one(engine: Engine, item: PrefillChunk | VerifyBlock) -> StepResult:
    """A step of one item that must succeed."""
    (result,) = engine.step([item])
    assert isinstance(result, StepResult), result
    return result


def prefill(
    engine: Engine, session: Session, chunk: int = 1000, layers: tuple[int, ...] = ()
) -> list[StepResult]:
    """All chunks of the session's tokens; the last result holds the first token."""
    tokens, results = list(session.token_ids), []
    for base in range(0, len(tokens), chunk):
        ids = tokens[base : base + chunk]
        last = base + len(ids) == len(tokens)
        results.append(run_one(engine, PrefillChunk(session, ids, base, last, layers)))
    return results


def hidden_rows(output: Any, layer_ids: tuple[int, ...], start: int, end: int) -> Tensor:
    """What DFlash calls the features of these layers, by Transformers' own counting."""
    return torch.cat([output.hidden_states[i + 1][0, start:end] for i in layer_ids], dim=-1)
