"""The one function that chooses tokens: the target's on its logits, the drafter's on its own.

docs/sampling.md states the rule. The result for a row depends on that row's logits and key only:
not on the other rows, their number or order, the number of threads or the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flashduet.sampling.confidence import probabilities
from flashduet.sampling.logit_table import BadLogits, LogitTable
from flashduet.sampling.noise import Ids
from flashduet.sampling.params import Sampling
from flashduet.sampling.race import Race

__all__ = [
    "BadLogits",
    "Choice",
    "DraftChoice",
    "RowKey",
    "choose_draft_rows",
    "choose_drafts",
    "choose_rows",
    "choose_tokens",
]


@dataclass(frozen=True, slots=True)
class RowKey:
    """What a row of logits is for: the position of the token being chosen, and its request's rule.

    Attributes:
        position: absolute, of the token to choose (the row's own position + 1).
        sampling: the request's parameters.
        choice: index among the request's answers.
    """

    position: int
    sampling: Sampling
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen token of each row."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The chosen token of each row, and its probability before noise under the row's filters."""

    tokens: list[int]
    confidence: list[float]


def choose_tokens(
    logits: torch.Tensor, first_position: int, sampling: Sampling, choice: int = 0
) -> Choice:
    """Choose for consecutive positions of one request.

    Args:
        logits: [n, V], any float type; row i is for the token of position first_position + i.

    Raises:
        BadLogits: a row holds NaN or +inf, or nothing but -inf.
        ValueError: the tensor is not [n, V].
    """
    return choose_rows(logits, _consecutive(logits, first_position, sampling, choice))


def choose_rows(logits: torch.Tensor, rows: Sequence[RowKey]) -> Choice:
    """Choose for rows of any requests: logits [n, V], one key a row. Raises as choose_tokens."""
    return Choice(_choose(_table(logits, rows), rows).tolist())


def choose_drafts(
    logits: torch.Tensor, first_position: int, sampling: Sampling, choice: int = 0
) -> DraftChoice:
    """As choose_tokens, with confidences: a drafter's proposal. Raises as choose_tokens."""
    return choose_draft_rows(logits, _consecutive(logits, first_position, sampling, choice))


def choose_draft_rows(logits: torch.Tensor, rows: Sequence[RowKey]) -> DraftChoice:
    """As choose_rows, with confidences. Raises as choose_tokens."""
    table = _table(logits, rows)
    tokens = _choose(table, rows)
    return DraftChoice(
        tokens.tolist(), probabilities(table, tokens, [key.sampling for key in rows])
    )


def _consecutive(
    logits: torch.Tensor, first_position: int, sampling: Sampling, choice: int
) -> list[RowKey]:
    return [RowKey(first_position + i, sampling, choice) for i in range(logits.shape[0])]


def _table(logits: torch.Tensor, rows: Sequence[RowKey]) -> LogitTable:
    table = LogitTable(logits)
    if table.rows != len(rows):
        raise ValueError(f"{table.rows} rows of logits, {len(rows)} keys")
    return table


def _choose(table: LogitTable, rows: Sequence[RowKey]) -> Ids:
    tokens = np.empty(len(rows), dtype=np.int64)
    greedy = np.array([i for i, key in enumerate(rows) if key.sampling.greedy], dtype=np.int64)
    if len(greedy):
        tokens[greedy] = table.first_maxima(greedy)
    sampled = [i for i, key in enumerate(rows) if not key.sampling.greedy]
    if sampled:
        keys = [rows[i] for i in sampled]
        tokens[sampled] = Race(
            table,
            sampled,
            [key.position for key in keys],
            [key.sampling for key in keys],
            [key.choice for key in keys],
        ).winners()
    return tokens
