"""`numerics=batch_invariant`: a position's result has the same bits in any pass.

Two things make a row's bits depend on its company. A matrix product may take another kernel for
another number of rows; so rows come in multiples of a number for which the processor's products are
seen to treat each row alike. And a sum over keys is rounded by how many there are and where they
start; so a row attends to a stretch of blocks that its own position alone decides, filled up with
masked ones. Whether this is enough is not assumed but tried out at start, with one session's rows
alone, in blocks, in one long chunk and among other sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashduet.kv.storage import KVStorage
from flashduet.packed_linear import PackedLinear, products
from target_service.batching import Batch, PlacedSpan, Span, make_batch, place
from target_service.visibility import Visibility

# Keys are counted in stretches of so many tokens.
_STRETCH_TOKENS = 128
# Numbers of rows that are tried, and what each is compared on.
_MULTIPLES = (1, 2, 4, 8, 16)
_TRIED_ROWS = 48


@dataclass(frozen=True, slots=True)
class Invariance:
    """How passes are laid out.

    Attributes:
        row_multiple: a pass has a multiple of so many rows.
        fold: rows of one sequence may share a product; else each attends on its own.
    """

    row_multiple: int
    fold: bool

    def pad(self, spans: Sequence[Span], kv: KVStorage) -> list[Span]:
        """Spans and rows of no sequence, which write to the store's spare block."""
        rows = sum(len(span.token_ids) for span in spans)
        return [*spans, *[Span([kv.num_blocks], 0, [0])] * (-rows % self.row_multiple)]

    def pad_rows(self, keep: Tensor) -> Tensor:
        """Row indices, the last one repeated up to a multiple; for the head's product."""
        missing = -len(keep) % self.row_multiple
        return torch.cat([keep, keep[-1:].expand(missing)]) if missing else keep

    def split(
        self, spans: Sequence[Span], rule: Visibility, kv: KVStorage
    ) -> tuple[list[PlacedSpan], list[Batch]]:
        """As `batching.split`; nothing attends outside of a batch."""
        groups: dict[tuple[int, int], list[PlacedSpan]] = {}
        for entry in place(spans):
            for part, blocks in self._parts(entry, rule, kv):
                kind = (part.rows - 1).bit_length()
                groups.setdefault((blocks, kind), []).append(part)
        return [], [make_batch(group, rule, kv, blocks) for (blocks, _), group in groups.items()]

    def _parts(
        self, entry: PlacedSpan, rule: Visibility, kv: KVStorage
    ) -> list[tuple[PlacedSpan, int]]:
        """Runs of rows that see the same stretch of blocks, and its length."""
        span, size = entry.span, kv.block_tokens
        stretch = max(1, _STRETCH_TOKENS // size)
        runs: list[tuple[int, int, int, int]] = []
        for offset in range(len(span.token_ids)):
            position = span.base + offset
            first = rule.first(position) // size
            blocks = position // size - first + 1
            blocks += -blocks % stretch
            if runs and self.fold and runs[-1][2:] == (first, blocks):
                runs[-1] = (runs[-1][0], offset + 1, first, blocks)
            else:
                runs.append((offset, offset + 1, first, blocks))
        return [
            (
                PlacedSpan(
                    Span(span.block_ids, span.base + start, span.token_ids[start:end]),
                    entry.row + start,
                ),
                blocks,
            )
            for start, end, _, blocks in runs
        ]


def find_row_multiple(model: nn.Module, dtype: torch.dtype) -> int | None:
    """The least number of rows in whose multiples every product of the model treats each row alike.

    None when there is no such number among those tried. At least the number of threads, so that
    element-wise work is cut between rows.
    """
    given: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    linears: list[PackedLinear] = products(model)
    for linear in linears:
        x = torch.randn(1, _TRIED_ROWS, linear.in_features, generator=generator)
        given.append(x.to(dtype))
    least = min(torch.get_num_threads(), _MULTIPLES[-1])
    for multiple in _MULTIPLES:
        multiple = math.lcm(multiple, least)
        if all(
            _treats_rows_alike(linear, x, multiple)
            for linear, x in zip(linears, given, strict=True)
        ):
            return multiple
    return None


def _treats_rows_alike(linear: Callable[[Tensor], Tensor], x: Tensor, multiple: int) -> bool:
    whole = linear(x)
    for count in range(multiple, _TRIED_ROWS, multiple):
        for start in {0, 1, _TRIED_ROWS - count}:
            end = start + count
            if end <= _TRIED_ROWS and not torch.equal(linear(x[:, start:end]), whole[:, start:end]):
                return False
    return True
