"""The draft engine in process: what a proposal costs without the service around it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from draft_service.context import Context
from draft_service.loading import load
from draft_service.settings import DraftSettings
from draft_service.work import IngestWork, ProposeWork
from engine_probes.serve import serve
from flashduet.sampling.params import Sampling


class DraftProbe:
    """An engine with one context of noise, whose size is all that a pass's time depends on."""

    def load(self, drafter: str, model: str, dtype: str, threads: int) -> dict[str, object]:
        """Load everything; says which target layers it reads and how long its blocks are."""
        logging.disable(logging.INFO)
        settings = DraftSettings.load(
            model=drafter, target_model=model, dtype=dtype, threads=threads, device="cpu"
        )
        self._engine = load(settings).engine
        self._blocks = range(self._engine.plan.num_blocks)
        config = self._engine.config
        return {
            "threads": torch.get_num_threads(),
            "layer_ids": list(config.target_layer_ids),
            "block_length": config.block_length,
            "feature_bytes": config.feature_width * self._engine.dtype.itemsize,
            "context_row_bytes": self._engine.store.row_bytes,
            "weight_bytes": self._engine.weight_bytes,
        }

    def forward(self, context: int, block_length: int, repeats: int) -> list[float]:
        """Seconds of the forward pass of one block after so many rows of context."""
        held = self._context(context)
        sampling = Sampling()
        # The context says one token again and again, which would be copied.
        work = ProposeWork(
            held, context, 1, block_length, sampling, 0, self._blocks, drafter_only=True
        )
        times = [self._engine.step([], [work]).times for _ in range(repeats)]
        return [(each.forwarded_ns - each.ingested_ns) / 1e9 for each in times]

    def _context(self, rows: int) -> Context:
        held = Context()
        features = torch.randn(rows, self._engine.config.feature_width).to(self._engine.dtype)
        ids: Sequence[int] = [1] * rows
        self._engine.step([IngestWork(held, 0, ids, features, self._blocks)], [])
        return held


if __name__ == "__main__":
    probe = DraftProbe()
    serve({"load": probe.load, "forward": probe.forward})
