"""What the tests of recorded passes share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flashduet.kv.blocks import BlockTable
from target_service import graphs as graphs_module
from target_service.batching import Span
from target_service.graphs import GraphedPasses
from tests.support.tape import TapeRecorder, unrecorded
from tests.support.varlen import reference_varlen
from tests.unit.target_support import (
    TinyTarget,
    prompt,
)

BUDGET = 1 << 26
LAYERS = (3, 0, 2)


def recorded(
    tiny: TinyTarget,
    budget: int = BUDGET,
    recorder: TapeRecorder | None = None,
    start_s: float = 0.0,
) -> TapeRecorder:
    """Let the engine's decoding passes be recorded, by default as they come."""
    recorder = recorder or TapeRecorder()
    tiny.engine.packed.varlen = reference_varlen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs_module, "_START_S", start_s)
        tiny.engine.record_passes(recorder, budget)
    return recorder


def own_graphs(tiny: TinyTarget) -> GraphedPasses:
    assert tiny.engine.packed.graphs is not None
    return tiny.engine.packed.graphs


def tape_of(tiny: TinyTarget) -> TapeRecorder:
    recorder = own_graphs(tiny)._recorder
    assert isinstance(recorder, TapeRecorder)
    return recorder


class Sequences:
    """Sequences of the engine's store, filled up to lengths of their own."""

    def __init__(self, tiny: TinyTarget, count: int) -> None:
        self.tiny = tiny
        self.bases = [1 + 17 * index % 71 for index in range(count)]
        self.tokens = [prompt(base + 64, seed=index) for index, base in enumerate(self.bases)]
        self.tables: list[BlockTable] = []
        for index, (base, tokens) in enumerate(zip(self.bases, self.tokens, strict=True)):
            table = tiny.table(base + 64, scattered=index % 2 == 1)
            self.tables.append(table)
            with torch.inference_mode(), unrecorded(tiny.engine.packed):
                self.forward([Span(table.block_ids, 0, tokens[:base])])

    def spans(self, rows: Sequence[int], first: int = 0) -> list[Span]:
        """One for each number of rows, each of another sequence, from the `first` on."""
        spans = []
        for place, count in enumerate(rows, first):
            index = place % len(self.tables)
            base = self.bases[index]
            tokens = self.tokens[index][base : base + count]
            spans.append(Span(self.tables[index].block_ids, base, tokens))
        return spans

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Logits of every second row and of the last, and features of all."""
        engine, rows = self.tiny.engine, sum(len(span.token_ids) for span in spans)
        with engine.features.recording(LAYERS):
            keep = torch.tensor([*range(0, rows - 1, 2), rows - 1])
            logits = engine.packed.forward(engine.kv, spans, keep)
            return logits, engine.features.rows(LAYERS, 0, rows)

    @torch.inference_mode()
    def forget(self, spans: Sequence[Span]) -> None:
        kv = self.tiny.engine.kv
        for span in spans:
            kv.clear(kv.locate(span.block_ids, span.base, span.end))

    def release(self) -> None:
        for table in self.tables:
            self.tiny.pool.release(table)
