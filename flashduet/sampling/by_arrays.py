"""Choosing in NumPy and PyTorch: for logits on a GPU, and where there is no machine code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from flashduet.sampling.confidence import probabilities
from flashduet.sampling.logit_table import LogitTable
from flashduet.sampling.noise import Ids
from flashduet.sampling.params import Sampling
from flashduet.sampling.penalties import RowBlock
from flashduet.sampling.race import Race


def choose_by_arrays(
    logits: Tensor, blocks: Sequence[RowBlock], confident: bool
) -> tuple[list[int], list[float]]:
    """The tokens of all rows [n, V], and their confidences if wanted, else an empty list.

    Raises:
        BadLogits: a row holds NaN or +inf, or nothing but -inf.
    """
    table = LogitTable(logits, blocks)
    tokens = _choose(table, blocks)
    return tokens.tolist(), probabilities(table, tokens, blocks) if confident else []


def _choose(table: LogitTable, blocks: Sequence[RowBlock]) -> Ids:
    tokens = np.empty(table.rows, dtype=np.int64)
    greedy: list[int] = []
    sampled: list[int] = []
    positions: list[int] = []
    samplings: list[Sampling] = []
    choices: list[int] = []
    row = 0
    for block in blocks:
        own = range(row, row + block.rows)
        row += block.rows
        if block.sampling.greedy:
            greedy += own
        else:
            sampled += own
            positions += range(block.first_position, block.first_position + block.rows)
            samplings += [block.sampling] * block.rows
            choices += [block.choice] * block.rows
    if greedy:
        tokens[greedy] = table.first_maxima(np.array(greedy))
    if sampled:
        tokens[sampled] = Race(table, sampled, positions, samplings, choices).winners()
    return tokens
