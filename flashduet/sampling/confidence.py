"""How sure a drafter is of its tokens: their probability after the filters, before the noise.

For the block-length controller, so ordinary floating point is enough: nothing that is emitted
depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flashduet.sampling.logit_table import LogitTable, Values
from flashduet.sampling.noise import Ids
from flashduet.sampling.params import Sampling
from flashduet.sampling.penalties import RowBlock

# Below this the division could overflow float32, and the best token has all the mass anyway.
_LEAST_TEMPERATURE = 1e-6


def probabilities(table: LogitTable, tokens: Ids, blocks: Sequence[RowBlock]) -> list[float]:
    """Probability of tokens[i] in row i under its temperature, top-k, top-p and min-p.

    A greedy row's is that of the plain softmax: its filtered one would always be 1.
    """
    samplings = [block.sampling for block in blocks for _ in range(block.rows)]
    return [
        _probability(table, row, int(token), sampling)
        for row, (token, sampling) in enumerate(zip(tokens, samplings, strict=True))
    ]


def _probability(table: LogitTable, row: int, token: int, sampling: Sampling) -> float:
    plain = sampling.greedy
    temperature = 1.0 if plain else max(sampling.temperature, _LEAST_TEMPERATURE)
    mass = np.exp((table.row(row) - table.maxima[row]) / np.float32(temperature))
    own = float(mass[token])
    if plain:
        return own / float(mass.sum(dtype=np.float64))
    if 0 < sampling.top_k < table.vocabulary:
        mass = np.partition(mass, -sampling.top_k)[-sampling.top_k :]
    total = float(mass.sum(dtype=np.float64))
    if sampling.top_p < 1:
        mass = _nucleus(mass, sampling.top_p * total)
    if sampling.top_p < 1 or sampling.min_p > 0:
        total = float(mass[mass >= sampling.min_p].sum(dtype=np.float64))
    return min(1.0, own / total) if total > 0 else 1.0


def _nucleus(mass: Values, wanted: float) -> Values:
    """The largest masses that together reach `wanted`."""
    for distance in (8.0, 16.0, math.inf):
        head = mass[mass >= math.exp(-distance)]
        if distance == math.inf or head.sum(dtype=np.float64) >= wanted:
            break
    head = np.sort(head)[::-1]
    reached = np.cumsum(head, dtype=np.float64)
    return head[: 1 + int(np.searchsorted(reached, wanted))]
