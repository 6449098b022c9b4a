"""Where the context keys and values of all sessions lie: one preallocated store of blocks.

Only the engine thread touches the store and a session's `Context`. Which session holds which blocks
is the business of `draft_service.context_pool`, on the event loop; every piece of work brings the
ids of its blocks along. Rows `0..length-1` are a context. A block's keys and values are written
after them for one pass and never counted, so they cannot persist: the next append overwrites them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from draft_service.config import DrafterConfig
from draft_service.network import KeysValues
from draft_service.quantized_rows import SCALE_BYTES, QuantizedStorage
from flashduet.kv.storage import KVStorage, LayerShape, Slots
from flashduet.sampling.history import TokenHistory

# How context rows are kept: as the network computes them, or as 8-bit integers with scales.
ContextDtype = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """Room for contexts.

    Attributes:
        rows: positions over all sessions; rounded up to whole blocks.
        block_rows: positions in a block; also the grain in which prefixes are found again.
        max_block_length: anchor + draft tokens of the longest proposal.
        dtype: `auto` keeps rows in the network's own type.
    """

    rows: int = 4096
    block_rows: int = 16
    max_block_length: int = 32
    dtype: ContextDtype = "auto"

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // self.block_rows)


@dataclass(eq=False, slots=True)
class Context:
    """One session's context as the engine knows it.

    Attributes:
        token_ids: int64 of the rows written, one each.
        history: the same counted, where the session's sampling looks at them.
    """

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    history: TokenHistory | None = None

    @property
    def length(self) -> int:
        """Rows written."""
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """So many more rows are written, one for each token."""
        self.token_ids.extend(token_ids)
        if self.history is not None:
            self.history.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on.

        Raises:
            ValueError: there are not that many.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a context of {self.length} rows back to {length}")
        del self.token_ids[length:]
        if self.history is not None:
            self.history.truncate(length)


class Seen(NamedTuple):
    """Slots of what one block sees in a layer: context rows, its own rows, and both in order."""

    context: Slots
    block: Slots
    both: Slots


class ContextStore:
    """Keys and values of all layers by slot, and the slots that blocks of a pass borrow.

    Args:
        config: the drafter's sizes.
        dtype, device: of the network.
    """

    def __init__(
        self, config: DrafterConfig, plan: ContextPlan, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan = plan
        self.num_layers = config.num_layers
        # A session without room for its block's rows borrows these, past all that is handed out.
        borrowed = -(-plan.max_block_length // plan.block_rows)
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        make = QuantizedStorage if plan.dtype == "int8" else KVStorage
        self.storage: KVStorage | QuantizedStorage = make(
            [shape] * config.num_layers,
            plan.num_blocks + borrowed,
            plan.block_rows,
            dtype,
            device,
        )
        self._borrowed = range(plan.num_blocks, plan.num_blocks + borrowed)

        vector = config.head_dim * dtype.itemsize
        if plan.dtype == "int8":
            vector = config.head_dim + SCALE_BYTES
        # Keys and values of all layers for one position.
        self.row_bytes = config.num_layers * config.num_kv_heads * 2 * vector

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def write(self, slots: Slots, rows: KeysValues) -> None:
        """Put keys and values [n, layers, kv_heads, d] at n slots."""
        for layer in range(self.num_layers):
            self.storage.write(layer, slots, rows.keys[:, layer], rows.values[:, layer])

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> Slots:
        """Slots of positions start..end-1 of the session that holds `block_ids`."""
        return self.storage.locate(block_ids, start, end)

    def seen(self, block_ids: Sequence[int], first: int, anchor: int, rows: int) -> Seen:
        """Slots of context positions first..anchor-1 and of a block of `rows` rows after them."""
        end = anchor + rows
        if len(block_ids) * self.plan.block_rows >= end:
            both = self.slots(block_ids, first, end)
            if isinstance(both, slice):
                middle = both.stop - rows
                return Seen(slice(both.start, middle), slice(middle, both.stop), both)
            return Seen(both[:-rows], both[-rows:], both)
        context = self.slots(block_ids, first, anchor)
        block = self.slots(self._borrowed, 0, rows)
        return Seen(context, block, _joined_slots(context, block, self.storage.device))

    def with_block(self, layer: int, seen: Seen, k: Tensor, v: Tensor) -> KeysValues:
        """One layer's context rows and the block's own after them.

        Args:
            k, v: [rows, kv_heads, head_dim].

        Returns:
            [kv_heads, context + rows, head_dim], good until the next call that writes.
        """
        storage = self.storage
        if isinstance(storage, QuantizedStorage):
            # The block's own rows are used once: rounding them would save nothing.
            keys, values = storage.fetch(layer, seen.context)
            parts = ((keys, k), (values, v))
            return KeysValues(*(torch.cat([a, b.transpose(0, 1)], dim=1) for a, b in parts))
        storage.write(layer, seen.block, k, v)
        return KeysValues(*storage.fetch(layer, seen.both))

    def rows(self, block_ids: Sequence[int], length: int) -> KeysValues:
        """A context's rows, keys and values [layers, kv_heads, length, head_dim]; copies."""
        slots = self.slots(block_ids, 0, length)
        layers = [self.storage.fetch(layer, slots) for layer in range(self.num_layers)]
        return KeysValues(*(torch.stack(parts) for parts in zip(*layers, strict=True)))


def joined_slots(parts: Sequence[Slots], device: torch.device) -> Slots:
    """Slots of several runs as one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([_indices(part, device) for part in parts])


def _joined_slots(first: Slots, second: Slots, device: torch.device) -> Slots:
    return joined_slots([first, second], device)


def _indices(slots: Slots, device: torch.device) -> Tensor:
    if isinstance(slots, slice):
        return torch.arange(slots.start, slots.stop, device=device)
    return slots
