"""Which sequences of a step attend together, and how their rows and blocks lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashduet.kv.storage import KVStorage
from target_service.visibility import Visibility

# Longer stretches are worth a call of their own.
_MOST_ROWS = 32
# A batch pads all its sequences to its longest: twice the shortest at most, and a little for all.
_SLACK_BLOCKS = 4


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
class PlacedSpan:
    """A span and the packed row's index of its first token."""

    span: Span
    row: int

    @property
    def rows(self) -> int:
        return len(self.span.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """s sequences of up to m rows and up to `blocks` blocks each.

    Attributes:
        block_ids: [s * blocks]; sequences with fewer are filled up with any.
        blocks: of each sequence.
        mask: [s, m, blocks * block_tokens], to be added to scores.
        rows: [s * m], each row's index in the packed row; a sequence with fewer repeats its last.
        kept: rows among those [s * m] that are no repetition; None when all are.
        targets: [len(kept)], where these go in the packed row.
        span: the packed rows that `rows` are, when they are neighbours in order.
    """

    block_ids: Tensor
    blocks: int
    mask: Tensor
    rows: Tensor
    kept: Tensor | None
    targets: Tensor
    span: slice | None

    def take(self, query: Tensor) -> Tensor:
        """[heads, n, size] of the packed row to [heads, s, m, size]."""
        rows = query[:, self.span] if self.span else query.index_select(1, self.rows)
        return rows.unflatten(1, self.mask.shape[:2])

    def put(self, output: Tensor, result: Tensor) -> None:
        """Write results [s, m, heads, size] to their rows of output [n, heads, size]."""
        flat = result.flatten(0, 1)
        if self.span:
            output[self.span] = flat
        else:
            flat = flat if self.kept is None else flat.index_select(0, self.kept)
            output.index_copy_(0, self.targets, flat)


def place(spans: Sequence[Span]) -> list[PlacedSpan]:
    """Give each span its row; they lie one after the other."""
    placed, row = [], 0
    for span in spans:
        placed.append(PlacedSpan(span, row))
        row += len(span.token_ids)
    return placed


def split(
    spans: Sequence[Span], rule: Visibility, kv: KVStorage
) -> tuple[list[PlacedSpan], list[Batch]]:
    """Spans that attend on their own, and batches of the others."""
    placed = place(spans)
    alone = [entry for entry in placed if entry.rows > _MOST_ROWS]
    batches = []
    for group in _groups([entry for entry in placed if entry.rows <= _MOST_ROWS], rule, kv):
        if len(group) == 1:
            alone += group
        else:
            batches.append(make_batch(group, rule, kv))
    return alone, batches


def _first_block(entry: PlacedSpan, rule: Visibility, kv: KVStorage) -> int:
    return rule.first(entry.span.base) // kv.block_tokens


def _last_block(entry: PlacedSpan, kv: KVStorage) -> int:
    return (entry.span.end - 1) // kv.block_tokens


def _groups(
    entries: Sequence[PlacedSpan], rule: Visibility, kv: KVStorage
) -> list[list[PlacedSpan]]:
    """Alike in their number of rows, to the next power of two, and in that of their blocks."""
    kinds: dict[int, list[tuple[int, PlacedSpan]]] = {}
    for entry in entries:
        blocks = _last_block(entry, kv) - _first_block(entry, rule, kv) + 1
        kinds.setdefault((entry.rows - 1).bit_length(), []).append((blocks, entry))
    groups: list[list[PlacedSpan]] = []
    for members in kinds.values():
        members.sort(key=lambda member: -member[0])
        longest = 0
        for blocks, entry in members:
            if not longest or longest > 2 * blocks + _SLACK_BLOCKS:
                groups.append([])
                longest = blocks
            groups[-1].append(entry)
    for group in groups:
        # Rows that are neighbours need no index.
        group.sort(key=lambda entry: entry.row)
    return groups


def make_batch(
    group: Sequence[PlacedSpan], rule: Visibility, kv: KVStorage, blocks: int = 0
) -> Batch:
    """Lay the spans side by side, each with as many blocks as the longest or `blocks` if more."""
    size, device = kv.block_tokens, kv.device
    firsts = [_first_block(entry, rule, kv) for entry in group]
    lasts = [_last_block(entry, kv) for entry in group]
    blocks = max(blocks, *(last - first + 1 for first, last in zip(firsts, lasts, strict=True)))
    most = max(entry.rows for entry in group)
    ids: list[int] = []
    for entry, first, last in zip(group, firsts, lasts, strict=True):
        own = entry.span.block_ids[first : last + 1]
        # Any block will do for those that the mask hides.
        ids += [*own, *[own[-1]] * (blocks - len(own))]
    steps = torch.arange(most)
    counts = torch.tensor([entry.rows for entry in group]).unsqueeze(1)
    offsets = torch.minimum(steps, counts - 1)
    rows = (torch.tensor([entry.row for entry in group]).unsqueeze(1) + offsets).view(-1)
    bases = torch.tensor([entry.span.base for entry in group]).unsqueeze(1)
    keys = torch.tensor(firsts).unsqueeze(1) * size + torch.arange(blocks * size)
    mask = rule.mask((bases + offsets).unsqueeze(2), keys.unsqueeze(1), kv.keys[0].dtype)
    kept = None
    if int(counts.min()) < most:
        kept = (steps < counts).view(-1).nonzero().view(-1)
    targets = rows if kept is None else rows[kept]
    first_row = group[0].row
    neighbours = kept is None and int(rows[-1]) - first_row == len(rows) - 1
    return Batch(
        torch.tensor(ids, device=device),
        blocks,
        mask.to(device),
        rows.to(device),
        None if kept is None else kept.to(device),
        targets.to(device),
        slice(first_row, first_row + len(rows)) if neighbours else None,
    )
