"""What a recorded pass is fixed to, and the tensors through which each step's own numbers reach it.

A recording repeats its kernels with the shapes and the memory that they had. So steps are rounded
up to one of few shapes, and their ids, positions, slots and tables are copied to where the recorded
kernels read. Rows that fill a shape up are sequences of their own in the store's spare block, which
nobody owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flashduet.kv.storage import KVStorage
from target_service.batching import Span

# Longer stretches are prefill chunks, whose arithmetic hides what a launch costs; and flash-attn
# cuts a sequence's queries into tiles of so many.
SPAN_ROWS = 64
# Of a sequence's table at least; few widths mean few recordings.
_LEAST_BLOCKS = 4

_Flat = TypeVar("_Flat", Tensor, np.ndarray)


@dataclass(frozen=True, slots=True)
class PassShape:
    """All that a recording is fixed to.

    Attributes:
        rows: of the packed row, a power of two.
        sequences: in it, those of no rows included.
        longest_rows: of one sequence. 1 is a kind of its own, where each row is a sequence:
            flash-attn reads it in another way.
        blocks: of each sequence's table.
    """

    rows: int
    sequences: int
    longest_rows: int
    blocks: int

    @property
    def sizes(self) -> list[int]:
        """Numbers of ids, positions, slots, kept rows, row starts, key starts, table entries."""
        starts = self.sequences + 1
        return [*[self.rows] * 4, starts, starts, self.sequences * self.blocks]


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What the kernels of a recording read, int32 on the device.

    Attributes:
        ids, positions, slots: [rows], of the tokens, and where their keys and values go.
        keep: [rows], rows whose logits are wanted, filled up with any.
        row_starts, key_starts: [sequences + 1], as in `VarlenPlan`.
        block_table: [sequences, blocks].
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    keep: Tensor
    row_starts: Tensor
    key_starts: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """Which shape a step is rounded up to.

    Attributes:
        most_rows: of a recorded pass, a power of two.
        most_blocks: that there are.
        block_tokens: of the store.
    """

    most_rows: int
    most_blocks: int
    block_tokens: int

    def find(self, spans: Sequence[Span]) -> PassShape | None:
        """The least shape that holds the spans; None for a step that is not worth a recording."""
        counts = [len(span.token_ids) for span in spans]
        rows, longest = sum(counts), max(counts)
        if rows > self.most_rows or longest > SPAN_ROWS:
            return None
        blocks = self.width(max(span.end for span in spans))
        bucket = _power_of_two(rows)
        if longest == 1:
            return PassShape(bucket, bucket, 1, blocks)
        return PassShape(
            bucket, self._sequences(len(spans), bucket), min(bucket, SPAN_ROWS), blocks
        )

    def _sequences(self, count: int, rows: int) -> int:
        """Room for those of nobody too, whatever the step's own rows leave of the shape's: up to
        half of them. One of no rows costs next to nothing, another shape is another recording."""
        return min(rows, _power_of_two(count + -(-rows // 2 // self.piece)))

    def first(self) -> list[PassShape]:
        """Those that short answers begin with, alone or together, the largest first."""
        shapes = []
        rows, blocks = self.most_rows, self.width(1)
        while rows:
            shapes.append(PassShape(rows, rows, 1, blocks))
            if 1 < rows <= SPAN_ROWS:
                shapes.append(PassShape(rows, self._sequences(1, rows), rows, blocks))
            rows //= 2
        return shapes

    @property
    def piece(self) -> int:
        """Rows of nobody that one sequence may have: the spare block has room for them."""
        return min(SPAN_ROWS, self.block_tokens)

    def width(self, tokens: int) -> int:
        """Blocks of a table for sequences of up to so many tokens."""
        blocks = max(_LEAST_BLOCKS, _power_of_two(-(-tokens // self.block_tokens)))
        return min(blocks, self.most_blocks)


class StaticInputs:
    """The one set of tensors that all recordings read; passes run one at a time.

    Args:
        rule: none of its shapes needs more room than is taken here.
    """

    def __init__(self, rule: ShapeRule, kv: KVStorage) -> None:
        self._rule = rule
        self._spare = kv.num_blocks
        most = rule.most_rows
        size = sum(PassShape(most, most, 1, rule.most_blocks).sizes)
        pinned = kv.device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._numbers = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=kv.device)

    @property
    def nbytes(self) -> int:
        """Of the device's memory."""
        return self._device.nbytes

    def views(self, shape: PassShape) -> PassInputs:
        """Where a recording of this shape finds its numbers."""
        ids, positions, slots, keep, row_starts, key_starts, table = _cut(self._device, shape)
        table = table.view(shape.sequences, shape.blocks)
        return PassInputs(ids, positions, slots, keep, row_starts, key_starts, table)

    def fill(self, shape: PassShape, spans: Sequence[Span], keep: Tensor) -> None:
        """Put a step's numbers there: one transfer, and the rows to keep.

        The step before must be over: the host's side is written anew.

        Args:
            spans: that the shape holds; with none, all rows are nobody's.
            keep: [k], int64, on the device.

        Raises:
            ValueError: a span's blocks do not hold its positions.
        """
        ids, positions, slots, kept, row_starts, key_starts, table = _cut(self._numbers, shape)
        table = table.reshape(shape.sequences, shape.blocks)
        size = self._rule.block_tokens
        # Entries behind a sequence's end are not read, but should they be, they are a block's.
        table[:] = self._spare
        kept[:] = row_starts[:] = key_starts[:] = 0
        row = keys = index = 0
        for span in [*spans, *self._nobodys(shape, spans)]:
            count = -(-span.end // size)
            if count > len(span.block_ids):
                raise ValueError(
                    f"positions up to {span.end} wanted, {len(span.block_ids)} blocks of {size} "
                    "are held"
                )
            end = row + len(span.token_ids)
            own = np.arange(span.base, span.end, dtype=np.int32)
            table[index, :count] = span.block_ids[:count]
            ids[row:end] = span.token_ids
            positions[row:end] = own
            slots[row:end] = table[index, own // size] * size + own % size
            row, keys, index = end, keys + span.end, index + 1
            row_starts[index], key_starts[index] = row, keys
        # Sequences of no rows and no keys.
        row_starts[index:], key_starts[index:] = row, keys
        length = sum(shape.sizes)
        self._device[:length].copy_(self._host[:length], non_blocking=True)
        _cut(self._device, shape)[3][: len(keep)].copy_(keep)

    def _nobodys(self, shape: PassShape, spans: Sequence[Span]) -> list[Span]:
        """Sequences of the rows that the step leaves over."""
        left = shape.rows - sum(len(span.token_ids) for span in spans)
        piece = min(shape.longest_rows, self._rule.piece)
        lengths = [piece] * (left // piece) + [left % piece] * bool(left % piece)
        return [Span([self._spare], 0, [0] * length) for length in lengths]


def _cut(flat: _Flat, shape: PassShape) -> list[_Flat]:
    """The parts of PassInputs, one after the other."""
    parts, start = [], 0
    for size in shape.sizes:
        parts.append(flat[start : start + size])
        start += size
    return parts


def _power_of_two(number: int) -> int:
    """The least that is no less."""
    return 1 << (number - 1).bit_length()
