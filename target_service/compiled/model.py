"""A compiled pass, run over the block store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flashduet.kv.storage import KVStorage
from target_service.batching import Span
from target_service.compiled.graph import LEAST_ROWS
from target_service.compiled.runners import make_runner
from target_service.survey import AttentionLayers


class CompiledModel:
    """Belongs to one thread, as an engine does.

    Args:
        package: a folder that `build` made, on this machine, for this model.
        layers: the model's attention layers; which module is which does not matter.

    Attributes:
        runner: natively where its library is.

    Raises:
        RuntimeError: it cannot be loaded.
    """

    def __init__(self, package: Path, layers: AttentionLayers) -> None:
        self._layers = layers
        self.runner = make_runner(package, layers)

    def forward(
        self, kv: KVStorage, spans: Sequence[Span], keep: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """As `PackedModel.forward`.

        Returns:
            logits [k, V], and the outputs [1, n, hidden] of all decoder layers, n at least 2.
        """
        wanted = len(keep)
        ids = [token_id for span in spans for token_id in span.token_ids]
        positions = [position for span in spans for position in range(span.base, span.end)]
        while len(ids) < LEAST_ROWS:
            ids.append(ids[-1])
            positions.append(positions[-1])
        if wanted < LEAST_ROWS:
            keep = keep.repeat(LEAST_ROWS)
        inputs = [torch.tensor([ids]), torch.tensor([positions]), keep]
        logits, *states = self.runner.run(kv, spans, inputs)
        return logits[:wanted], states

    @torch.inference_mode()
    def probe(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [n, V] of the tokens ids [1, n] from position 0, over a store of its own.

        In three passes, of which one has a single row: kernels and weights are warm after it.
        """
        tokens = ids[0].tolist()
        size = 16
        blocks = range(-(-len(tokens) // size))
        kv = KVStorage(self._layers.shapes, len(blocks), size, dtype)
        parts, start = [], 0
        for count in (len(tokens) // 2, 1, len(tokens)):
            part = tokens[start : start + count]
            if part:
                span = Span(blocks, start, part)
                parts.append(self.forward(kv, [span], torch.arange(len(part)))[0])
            start += count
        return torch.cat(parts)
