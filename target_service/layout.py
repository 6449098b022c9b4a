"""Where each item of a step lies in the packed row, and which of its rows have logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from target_service.batching import Span
from target_service.session import PrefillChunk, WorkItem


@dataclass(frozen=True, slots=True)
class Part:
    """One item's place in a step.

    Attributes:
        first_row: of its tokens in the packed row.
        first_kept: of its rows among those whose logits are computed.
        kept: how many of its rows, its last ones, have logits.
        chooses: whether tokens are chosen from them; those of an inner chunk are only looked at.
    """

    item: WorkItem
    span: Span
    first_row: int
    first_kept: int
    kept: int
    chooses: bool

    @property
    def rows(self) -> int:
        return len(self.span.token_ids)

    @property
    def logit_rows(self) -> range:
        return range(self.first_kept, self.first_kept + self.kept)


def lay_out(items: Sequence[WorkItem]) -> list[Part]:
    """Check the items and give each its rows.

    Raises:
        ValueError: a session's table does not end where its item begins.
    """
    parts: list[Part] = []
    row = kept_row = 0
    for item in items:
        session = item.session
        if item.base != session.table.length:
            raise ValueError(
                f"the table holds {session.table.length} tokens, base {item.base} given"
            )
        if isinstance(item, PrefillChunk):
            # The last row tells whether all before it were sound: a bad number spreads to it.
            tokens, kept, chooses = item.token_ids, 1, item.last
        else:
            tokens = (session.token_ids[item.base], *item.token_ids)
            kept, chooses = len(tokens), True
        span = Span(session.table.block_ids, item.base, tokens)
        parts.append(Part(item, span, row, kept_row, kept, chooses))
        row += len(tokens)
        kept_row += kept
    return parts


def rows_to_keep(parts: Sequence[Part], device: torch.device) -> Tensor:
    rows = [
        row
        for part in parts
        for row in range(part.first_row + part.rows - part.kept, part.first_row + part.rows)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)
