"""One forward pass over tokens of many sequences: where each attends, found once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashduet.kv.storage import KVStorage, LayerShape, Slots
from target_service.attention import Extras
from target_service.batching import Batch, PlacedSpan, Span, split
from target_service.flash_varlen import (
    VarlenFunction,
    VarlenPlan,
    attend_varlen,
    can_plan,
    plan,
)
from target_service.kernels import attend
from target_service.survey import AttentionLayers
from target_service.visibility import Visibility

Split = Callable[[Sequence[Span], Visibility, KVStorage], tuple[list[PlacedSpan], list[Batch]]]


@dataclass(frozen=True, slots=True)
class _View:
    """What the rows of one sequence attend to under one rule."""

    rows: slice
    slots: Slots
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """All that a rule lets the pass's rows see."""

    views: list[_View]
    batches: list[Batch]


class PackedPass:
    """An `AttentionPass` that writes the row's keys and values, then attends.

    Long stretches of one sequence attend on their own, to a view of the store where their blocks
    are neighbours. Short ones of many sequences are gathered into batches: a call for each would
    cost many times its arithmetic.

    Args:
        spans: in the order of the row's tokens; no two of one sequence.
        room: tensors for gathered blocks, kept from pass to pass.
        split: which spans attend on their own, and which in batches.
        varlen: flash-attn's function where it can run; it takes all spans in one call.
    """

    def __init__(
        self,
        layers: AttentionLayers,
        kv: KVStorage,
        spans: Sequence[Span],
        room: GatherRoom,
        split: Split = split,
        varlen: VarlenFunction | None = None,
    ) -> None:
        self._layers = layers
        self._kv = kv
        self._room = room
        self._split = split
        self._varlen = varlen
        self._spans = spans
        # A row may be filled up with tokens that take no part in attention.
        self._rows = sum(len(span.token_ids) for span in spans)
        self._written = _written(kv, spans)
        # Made for the first layer of each kind.
        self._seen: dict[Visibility, _Seen] = {}
        self._plans: dict[Visibility, VarlenPlan] = {}

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, extras: Extras, mask: Any
    ) -> Tensor:
        return self._attend(self._layers.index[id(layer)], query[0], key[0], value[0], extras)

    def attend_at(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras
    ) -> Tensor:
        query, key, value = query[0], key[0], value[0]
        filled = query.shape[1] - self._rows
        if not filled:
            return self._attend(index, query, key, value, extras).contiguous()
        rows = slice(self._rows)
        output = self._attend(index, query[:, rows], key[:, rows], value[:, rows], extras)
        return F.pad(output, (0, 0, 0, 0, 0, filled))

    def _attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras
    ) -> Tensor:
        kv = self._kv
        kv.put(index, self._written, key, value)
        rule = self._layers.rules[index]
        if self._varlen is not None and can_plan(rule, extras):
            planned = self._plans.get(rule)
            if planned is None:
                planned = self._plans[rule] = plan(self._spans, rule, kv)
            return attend_varlen(self._varlen, planned, query, kv, index, extras).unsqueeze(0)
        seen = self._seen.get(rule)
        if seen is None:
            seen = self._seen[rule] = self._see(rule)
        if not seen.batches and len(seen.views) == 1:
            return self._attend_view(index, seen.views[0], query, extras)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for view in seen.views:
            output[view.rows] = self._attend_view(index, view, query[:, view.rows], extras)[0]
        for batch in seen.batches:
            keys, values = self._room.fetch(kv, index, batch.block_ids)
            count = len(batch.block_ids) // batch.blocks
            result = attend(
                batch.take(query),
                keys.unflatten(1, (count, -1)),
                values.unflatten(1, (count, -1)),
                batch.mask,
                extras,
                batched=True,
            )
            batch.put(output, result)
        return output.unsqueeze(0)

    def _attend_view(self, index: int, view: _View, query: Tensor, extras: Extras) -> Tensor:
        keys, values = self._kv.fetch(index, view.slots)
        return attend(
            query.unsqueeze(1),
            keys.unsqueeze(1),
            values.unsqueeze(1),
            view.mask,
            extras,
            batched=False,
        )

    def _see(self, rule: Visibility) -> _Seen:
        alone, batches = self._split(self._spans, rule, self._kv)
        views = []
        dtype, device = self._kv.keys[0].dtype, self._kv.device
        for placed in alone:
            span, count = placed.span, len(placed.span.token_ids)
            first = rule.first(span.base)
            mask = None
            if count > 1:
                queries = torch.arange(span.base, span.end).view(1, -1, 1)
                keys = torch.arange(first, span.end).view(1, 1, -1)
                mask = rule.mask(queries, keys, dtype).to(device)
            slots = self._kv.locate(span.block_ids, first, span.end)
            views.append(_View(slice(placed.row, placed.row + count), slots, mask))
        return _Seen(views, batches)


class GatherRoom:
    """Memory that gathered keys and values are copied into, by the shape of a layer's entries."""

    def __init__(self) -> None:
        self._held: dict[LayerShape, tuple[Tensor, Tensor]] = {}

    def fetch(self, kv: KVStorage, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `KVStorage.fetch_blocks`; what an earlier call gave is overwritten."""
        shape = kv.layers[layer]
        slots = len(block_ids) * kv.block_tokens
        sizes = (shape.kv_heads * shape.key_size, shape.kv_heads * shape.value_size)
        held = self._held.get(shape)
        if held is None or held[0].numel() < slots * sizes[0]:
            # Room for growth, so that sessions growing by a block do not take new memory each.
            most = 1 << (slots - 1).bit_length()
            like = kv.keys[layer]
            held = like.new_empty(most * sizes[0]), like.new_empty(most * sizes[1])
            self._held[shape] = held
        return kv.fetch_blocks(
            layer, block_ids, (held[0][: slots * sizes[0]], held[1][: slots * sizes[1]])
        )


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
