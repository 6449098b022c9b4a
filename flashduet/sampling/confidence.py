"""How sure a drafter is of its tokens: their probability after the filters, before the noise.

For the block-length controller, so ordinary floating point is enough: nothing that is emitted
depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from flashduet.sampling.elementary import FloatArray
from flashduet.sampling.logit_table import LEAST_TEMPERATURE, LogitTable, Values
from flashduet.sampling.noise import Ids
from flashduet.sampling.params import Sampling
from flashduet.sampling.penalties import RowBlock

# A nucleus seldom reaches further below the best token, in units of the temperature.
_HEAD = 8.0


def probabilities(table: LogitTable, tokens: Ids, blocks: Sequence[RowBlock]) -> list[float]:
    """Probability of tokens[i] in row i under its temperature, top-k, top-p and min-p.

    A greedy row's is that of the plain softmax: its filtered one would always be 1.
    """
    samplings = [block.sampling for block in blocks for _ in range(block.rows)]
    rows = np.arange(table.rows)
    temperatures = np.array(
        [1.0 if s.greedy else max(s.temperature, LEAST_TEMPERATURE) for s in samplings]
    )
    probability = table.softmax(rows, temperatures)
    token_ids = torch.from_numpy(tokens).to(probability.device)
    own = probability.gather(1, token_ids[:, None])[:, 0].double().cpu().numpy()
    filtered = np.array([i for i, s in enumerate(samplings) if _filters(s, table)], dtype=np.int64)
    if len(filtered):
        # From here on in units of the best token's probability.
        best = probability.amax(-1).double().cpu().numpy()[filtered]
        own[filtered] /= best * _kept_masses(
            table, filtered, [samplings[i] for i in filtered], temperatures[filtered], 1 / best
        )
    return np.minimum(own, 1.0).tolist()


def _filters(sampling: Sampling, table: LogitTable) -> bool:
    top_k = 0 < sampling.top_k < table.vocabulary
    return not sampling.greedy and (top_k or sampling.top_p < 1 or sampling.min_p > 0)


def _kept_masses(
    table: LogitTable,
    rows: Ids,
    samplings: Sequence[Sampling],
    temperatures: FloatArray,
    totals: FloatArray,
) -> FloatArray:
    """What the filters keep of each row's mass, in masses of its best token, as `totals` are."""
    depth = [max(_HEAD, -math.log(s.min_p) if s.min_p > 0 else 0.0) for s in samplings]
    least = (table.maxima[rows] - temperatures * depth).astype(np.float32)
    for i, sampling in enumerate(samplings):
        if 0 < sampling.top_k < table.vocabulary:
            least[i] = table.least_of_best(rows[i : i + 1], sampling.top_k)[0]
    heads = [values for _, values in table.heads(rows, least)]
    return np.array(
        [
            _kept_mass(table, int(row), values, sampling, temperature, total)
            for row, values, sampling, temperature, total in zip(
                rows, heads, samplings, temperatures.tolist(), totals.tolist(), strict=True
            )
        ]
    )


def _kept_mass(
    table: LogitTable,
    row: int,
    values: Values,
    sampling: Sampling,
    temperature: float,
    total: float,
) -> float:
    mass = np.exp((values.astype(np.float64) - table.maxima[row]) / temperature)
    if 0 < sampling.top_k < table.vocabulary:
        mass = mass[: sampling.top_k]
        total = float(mass.sum())
    reached = np.cumsum(mass)
    if sampling.top_p < 1:
        wanted = sampling.top_p * total
        if reached[-1] < wanted:  # the nucleus reaches below the head
            every = np.sort(table.row(row))[::-1].astype(np.float64)
            mass = np.exp((every - table.maxima[row]) / temperature)
            reached = np.cumsum(mass)
        last = min(int(np.searchsorted(reached, wanted)), len(reached) - 1)
    else:
        last = len(reached) - 1
    if sampling.min_p > 0:
        last = min(last, int(np.count_nonzero(mass >= sampling.min_p)) - 1)
    return float(reached[max(last, 0)])
