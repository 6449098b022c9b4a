"""When two passes may choose differently: only where they cannot tell the tokens apart.

Passes of another shape round differently. A difference is a near-tie when the tokens' gap,
recomputed in float64, is within twice the error measured there: the largest difference between a
logit of a pass in the served data type and in float64, over the shapes of pass that took part.

With sampling the gap is that of the perturbed scores, logit / temperature + noise. A token can
also be at a border of top-k, top-p or min-p; its distance from the border is then held against
twice the error measured of that very quantity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashduet.sampling.params import Sampling

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether it is a near-tie, and by what.

    `quantity` is "score" (logits, or perturbed scores when sampling), or the filter at whose
    border a token is; `gap` and `bound` are in that quantity's unit.
    """

    near_tie: bool
    quantity: str
    gap: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Row:
    """What decides at a position, [V] each: distance from the best logit / temperature, scores,
    and the probability mass before each token within top-k."""

    distance: Array
    score: Array
    before: Array
    kth: float
    next_after_kth: float


def judge(
    exact: Array,
    passes: Sequence[Array],
    tokens: tuple[int, int],
    sampling: Sampling,
    position: int,
) -> Judgement:
    """Judge two tokens that were chosen for the same position.

    Args:
        exact: logits [V] in float64.
        passes: logits [V] of passes in the served data type, one for each shape.
        position: absolute, of the token that was chosen.
    """
    if sampling.greedy:
        error = max(float(np.abs(each - exact).max()) for each in passes)
        gap = float(exact.max() - min(exact[tokens[0]], exact[tokens[1]]))
        return Judgement(gap <= 2 * error, "score", gap, 2 * error)
    return _judge_sampled(exact, passes, tokens, sampling, position)


def _judge_sampled(
    exact: Array,
    passes: Sequence[Array],
    tokens: tuple[int, int],
    sampling: Sampling,
    position: int,
) -> Judgement:
    noise = _noise(exact.size, sampling, position)
    order = np.argsort(-exact, kind="stable")
    row = _row(exact, noise, order, sampling)
    rounded = [_row(each, noise, order, sampling) for each in passes]
    # Tokens far below the best can neither win nor move a border; their error says nothing.
    near = row.score >= row.score[list(tokens)].min()
    near |= row.distance >= row.distance[list(tokens)].min()
    bound = 2 * max(float(np.abs(each.distance - row.distance)[near].max()) for each in rounded)
    mass_bound = 2 * max(float(np.abs(each.before - row.before)[near].max()) for each in rounded)
    least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf

    # What every pass keeps, however it rounds: a token must come near the best of these.
    sure = (
        (row.distance > row.next_after_kth + bound)
        & ((row.before < sampling.top_p - mass_bound) | (row.before == 0))
        & (row.distance >= least + bound)
    )
    best = float(row.score[sure].max()) if sure.any() else -math.inf
    judgements = []
    for token in tokens:
        judgements += [
            _held("top_k", row.kth - float(row.distance[token]), bound),
            _held("top_p", _excess(float(row.before[token]), sampling.top_p), mass_bound),
            _held("min_p", least - float(row.distance[token]), bound),
            _held("score", best - float(row.score[token]), bound),
        ]
    failed = [each for each in judgements if not each.near_tie]
    if failed:
        return max(failed, key=lambda each: each.gap)
    return max(judgements, key=lambda each: (each.gap > 0, each.gap))


def _excess(before: float, top_p: float) -> float:
    """How far past the nucleus a token is; the first token is always in it."""
    return before - top_p if before > 0 and top_p < 1 else 0.0


def _held(quantity: str, gap: float, bound: float) -> Judgement:
    gap = max(0.0, gap)
    return Judgement(gap <= bound, quantity, gap, bound)


def _noise(vocabulary: int, sampling: Sampling, position: int) -> Array:
    import torch

    from flashduet.sampling.noise import gumbel

    return gumbel(sampling.seed, 0, position, torch.arange(vocabulary)).numpy()


def _row(logits: Array, noise: Array, order: npt.NDArray[np.intp], sampling: Sampling) -> _Row:
    distance = (logits - logits.max()) / sampling.temperature
    mass = np.exp(distance)
    kth, next_after_kth = -math.inf, -math.inf
    if 0 < sampling.top_k < logits.size:
        ordered = np.sort(distance)[::-1]
        kth, next_after_kth = float(ordered[sampling.top_k - 1]), float(ordered[sampling.top_k])
        mass[distance < kth] = 0.0
    before = np.empty_like(mass)
    # One order for all passes: what is measured is the sums' error, not who stands first.
    before[order] = np.cumsum(mass[order]) - mass[order]
    return _Row(distance, distance + noise, before / mass.sum(), kth, next_after_kth)
