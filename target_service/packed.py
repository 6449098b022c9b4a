"""One forward pass over tokens of many sequences: where each attends, found once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashduet.kv.storage import KVStorage, Slots
from target_service.attention import Extras
from target_service.kernels import attend
from target_service.survey import AttentionLayers
from target_service.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring positions of one sequence in the packed row.

    Attributes:
        block_ids: the sequence's blocks; they have room for all its positions.
        base: position of the first token.
        token_ids: tokens at base.. .
    """

    block_ids: Sequence[int]
    base: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.base + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _View:
    """What one span's rows attend to under one rule."""

    rows: slice
    slots: Slots
    mask: Tensor | None


class PackedPass:
    """An `AttentionPass` that writes the row's keys and values, then attends span by span.

    Args:
        spans: in the order of the row's tokens; no two of one sequence.
    """

    def __init__(self, layers: AttentionLayers, kv: KVStorage, spans: Sequence[Span]) -> None:
        self._layers = layers
        self._kv = kv
        self._rows = sum(len(span.token_ids) for span in spans)
        self._written = _written(kv, spans)
        self._views = {rule: self._see(rule, spans) for rule in set(layers.rules)}

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, extras: Extras, mask: Any
    ) -> Tensor:
        index = self._layers.index[id(layer)]
        kv = self._kv
        kv.write(index, self._written, key[0].transpose(0, 1), value[0].transpose(0, 1))
        views = self._views[self._layers.rules[index]]
        query = query[0]
        if len(views) == 1:
            keys, values = kv.fetch(index, views[0].slots)
            return attend(query, keys, values, views[0].mask, extras).unsqueeze(0)
        output = query.new_empty(1, self._rows, query.shape[0], value.shape[-1])
        for view in views:
            keys, values = kv.fetch(index, view.slots)
            output[0, view.rows] = attend(query[:, view.rows], keys, values, view.mask, extras)
        return output

    def _see(self, rule: Visibility, spans: Sequence[Span]) -> list[_View]:
        views, row = [], 0
        dtype, device = self._kv.keys[0].dtype, self._kv.device
        for span in spans:
            first, count = rule.first(span.base), len(span.token_ids)
            mask = None
            if count > 1:
                mask = rule.mask(span.base, count, first, dtype).to(device)
            slots = self._kv.locate(span.block_ids, first, span.end)
            views.append(_View(slice(row, row + count), slots, mask))
            row += count
        return views


def _written(kv: KVStorage, spans: Sequence[Span]) -> Slots:
    located = [kv.locate(span.block_ids, span.base, span.end) for span in spans]
    if len(located) == 1:
        return located[0]
    parts = [
        torch.arange(slots.start, slots.stop, device=kv.device)
        if isinstance(slots, slice)
        else slots
        for slots in located
    ]
    return torch.cat(parts)
