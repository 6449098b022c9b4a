"""Logprobs: how likely the raw model held the chosen token and the most likely ones.

Raw means the softmax of the logits as the model gave them, before bias, penalties, temperature,
filters and noise. The work is for the rows that ask, all of a step in one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flashduet.sampling.logit_table import LogitTable
from flashduet.sampling.position_logprobs import (
    MAX_TOP_LOGPROBS,
    PositionLogprobs,
    TokenLogprob,
)


def row_logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], top: Sequence[int]
) -> list[PositionLogprobs]:
    """Logprobs of some rows of a step.

    Args:
        logits: [n, V], any float type, as the model gave them.
        rows: indices into logits, one an entry.
        token_ids: the token that was chosen in each of these rows.
        top: how many of the most likely tokens each wants, 0 to MAX_TOP_LOGPROBS. Equal ones come
            by id; tokens that the model holds impossible (-inf) are left out.

    Raises:
        BadLogits: a row holds NaN or +inf, or nothing but -inf; numbered within `rows`.
        ValueError: a number in `top` is out of range, or the three are not of one length.
    """
    if not len(rows) == len(token_ids) == len(top):
        raise ValueError(f"{len(rows)} rows, {len(token_ids)} tokens, {len(top)} numbers of top")
    if not all(0 <= count <= MAX_TOP_LOGPROBS for count in top):
        raise ValueError(f"top logprobs are 0 to {MAX_TOP_LOGPROBS}, {list(top)} given")
    if not rows:
        return []
    if list(rows) != list(range(logits.shape[0])):
        logits = logits.index_select(0, torch.tensor(list(rows), device=logits.device))
    table = LogitTable(logits)
    masses = table.log_masses()
    chosen = table.values(np.arange(len(rows)), np.array(token_ids)[:, None])[:, 0] - masses
    best = _most_likely(table, max(top), masses)
    return [
        PositionLogprobs(TokenLogprob(int(token_id), logprob), tuple(likely[:count]))
        for token_id, logprob, likely, count in zip(
            token_ids, chosen.tolist(), best, top, strict=True
        )
    ]


def _most_likely(
    table: LogitTable, count: int, masses: npt.NDArray[np.float64]
) -> list[list[TokenLogprob]]:
    """Of each row the `count` most likely tokens, best first, equal ones by id."""
    if count == 0:
        return [[] for _ in range(table.rows)]
    rows = np.arange(table.rows)
    return [
        [
            TokenLogprob(token_id, logprob)
            for token_id, logprob in zip(
                ids[:count].tolist(), (values[:count] - masses[row]).tolist(), strict=True
            )
        ]
        for row, (ids, values) in enumerate(table.heads(rows, table.least_of_best(rows, count)))
    ]
