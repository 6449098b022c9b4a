"""Where the keys and values of all sequences lie: preallocated tables of slots for each layer.

Slot = block id * block_tokens + offset in the block. Which sequence owns which block is the block
pool's business; this part only reads and writes slots. Owned by one engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token's entry in one layer takes: kv_heads * (key_size + value_size) numbers."""

    kv_heads: int
    key_size: int
    value_size: int

    @property
    def numbers(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size)


# Slots of consecutive positions: a range where they are neighbours, else their indices [n], int64.
Slots = slice | Tensor


class KVStorage:
    """Keys and values by layer and slot, tensors [kv_heads, num_slots, size].

    A head's slots are neighbours: attention reads consecutive positions as a view whose rows touch,
    which its matrix products take twice as fast as rows that are apart, and whole blocks are
    gathered as rows of block_tokens * size numbers. All numbers are finite from the start, so that
    a masked slot that was never written does no harm.

    Args:
        layers: the shape of each layer's entries.
        num_blocks: blocks of `block_tokens` slots each.
        dtype, device: of the tensors. Memory of the CPU's is taken as it is first written.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"{num_blocks} blocks of {block_tokens} tokens: at least 1 of 1")
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.device = torch.device(device)
        # One block more than is handed out: heads whose tables are a power of two apart push each
        # other out of the processor's caches.
        slots = (num_blocks + 1) * block_tokens

        def table(heads: int, size: int) -> Tensor:
            return torch.zeros(heads, slots, size, dtype=dtype, device=self.device)

        self.keys = [table(shape.kv_heads, shape.key_size) for shape in self.layers]
        self.values = [table(shape.kv_heads, shape.value_size) for shape in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, used or not."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    def locate(self, block_ids: Sequence[int], start: int, end: int) -> Slots:
        """Slots of the positions start..end-1 of a sequence that holds `block_ids` in order.

        The same for all layers, so it is worth finding once a step.

        Raises:
            ValueError: the blocks do not hold these positions.
        """
        size = self.block_tokens
        if not 0 <= start <= end <= len(block_ids) * size:
            raise ValueError(
                f"positions {start} to {end} wanted, {len(block_ids)} blocks of {size} are held"
            )
        first, last = start // size, max(start, end - 1) // size
        ids = block_ids[first : last + 1]
        if not ids:
            return slice(0, 0)
        if all(ids[i] + 1 == ids[i + 1] for i in range(len(ids) - 1)):
            begin = ids[0] * size + start % size
            return slice(begin, begin + end - start)
        blocks = torch.tensor(ids).unsqueeze(1) * size
        slots = (blocks + torch.arange(size)).view(-1)
        skipped = first * size
        return slots[start - skipped : end - skipped].to(self.device)

    def write(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Put keys [n, kv_heads, key_size] and values [n, kv_heads, value_size] at n slots."""
        self.put(layer, slots, keys.transpose(0, 1), values.transpose(0, 1))

    def put(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """As `write`, of keys and values that are [kv_heads, n, size] already."""
        if isinstance(slots, slice):
            self.keys[layer][:, slots] = keys
            self.values[layer][:, slots] = values
        else:
            self.keys[layer].index_copy_(1, slots, keys)
            self.values[layer].index_copy_(1, slots, values)

    def fetch(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys [kv_heads, n, key_size] and values [kv_heads, n, value_size] at n slots.

        Views of the tables for a range, copies otherwise.
        """
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(slots, slice):
            return keys[:, slots], values[:, slots]
        return keys.index_select(1, slots), values.index_select(1, slots)

    def fetch_blocks(
        self, layer: int, block_ids: Tensor, room: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, n * block_tokens, size] of n whole blocks, copied.

        Args:
            block_ids: [n], int64.
            room: tensors to copy into, as an earlier call for as many blocks gave them back; fresh
                memory for every layer costs more than the copy.
        """
        found = []
        for which, table in enumerate((self.keys[layer], self.values[layer])):
            heads, _, size = table.shape
            blocks = table.view(heads, -1, self.block_tokens * size)
            out = None
            if room is not None:
                out = room[which].view(heads, len(block_ids), self.block_tokens * size)
            gathered = torch.index_select(blocks, 1, block_ids, out=out)
            found.append(gathered.view(heads, -1, size))
        return found[0], found[1]

    def clear(self, slots: Slots) -> None:
        """Put zeros at slots of all layers."""
        for table in (*self.keys, *self.values):
            if isinstance(slots, slice):
                table[:, slots] = 0
            else:
                table.index_fill_(1, slots, 0)

    def read(
        self, layer: int, block_ids: Sequence[int], start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """`fetch` of the slots that hold positions start..end-1 of a sequence."""
        return self.fetch(layer, self.locate(block_ids, start, end))
