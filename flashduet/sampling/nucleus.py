"""The filters as prefixes of one order: which tokens of a row may be chosen.

Tokens are ordered by logit, largest first, equal ones by id. Top-k, top-p and min-p each keep a
prefix of that order, so all together they do, and a prefix is named by where it ends (`Cut`).

Top-p needs sums of probabilities over the vocabulary. They are sums of integers, the mass
round(2^40 exp((logit - largest) / temperature)), so they are exact, do not depend on any order of
summation, and the border falls in the same place in any batch. A token is kept iff the mass before
it is less than top_p times the total, which keeps at least the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashduet.sampling.elementary import FloatArray, exp
from flashduet.sampling.logit_table import LogitTable, Values
from flashduet.sampling.noise import Ids
from flashduet.sampling.params import Sampling

MASS_UNITS = 2.0**40
# exp(-64) is less than half a unit, so nothing is lost where exp's argument is held up here.
_LEAST_DISTANCE = -64.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a prefix: kept are logits above `value`, and those equal to it with id < `end`."""

    value: float
    end: int


def distances(
    values: Values, maxima: FloatArray | float, temperatures: FloatArray | float
) -> FloatArray:
    """(logit - the row's largest) / temperature in float64, broadcast: 0 for the best, or less."""
    with np.errstate(over="ignore"):  # a tiny temperature may give -inf, which is what it means
        return np.asarray((values.astype(np.float64) - maxima) / temperatures)


def masses(distance: FloatArray) -> Ids:
    """Probability mass relative to the row's best token, in units of 2^-40."""
    return np.rint(exp(np.maximum(distance, _LEAST_DISTANCE)) * MASS_UNITS).astype(np.int64)


def top_k_cut(table: LogitTable, row: int, sampling: Sampling) -> Cut:
    """Where top-k, and top-p within it, end in a row. `sampling.top_k` must be 1 to V - 1."""
    k = sampling.top_k
    groups = table.group_maxima.shape[1]
    # The k best groups hold k tokens at or above the k-th best maximum: nothing below can matter.
    floor = -np.inf if k >= groups else np.partition(table.group_maxima[row], -k)[-k]
    ids, values = table.at_least(row, np.float32(floor))
    least = np.partition(values, -k)[-k]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: k - len(above)]
    best = np.concatenate([above, equal])
    best = best[np.argsort(-values[best], kind="stable")]
    if sampling.top_p < 1:
        mass = masses(distances(values[best], float(table.maxima[row]), sampling.temperature))
        before = np.cumsum(mass) - mass
        best = best[: np.searchsorted(before, _limit(sampling.top_p, int(mass.sum())))]
    return Cut(float(values[best[-1]]), int(ids[best[-1]]) + 1)


def in_nucleus(
    table: LogitTable,
    rows: Ids,
    tokens: Ids,
    values: Values,
    temperatures: FloatArray,
    top_p: FloatArray,
) -> npt.NDArray[np.bool_]:
    """Whether top-p keeps token tokens[i], whose logit is values[i], in row rows[i].

    Floating-point sums with a bound on their error decide nearly always, from the groups that can
    hold a token before this one or else from the whole row; the exact sums decide the rest. The
    answer is always that of the exact sums.
    """
    maxima = table.maxima[rows]
    where, groups = np.nonzero(table.group_maxima[rows] >= values[:, None])
    found = table.group_values(rows[where], groups)
    mass = np.exp(
        distances(found, maxima[where, None].astype(np.float64), temperatures[where, None])
    )
    value, token = values[where, None], tokens[where, None]
    ids = groups[:, None] * found.shape[1] + np.arange(found.shape[1])
    first = (found > value) | ((found == value) & (ids < token))
    before = np.bincount(where, np.where(first, mass, 0.0).sum(axis=1), minlength=len(rows))
    # Mass not looked at can only make the total larger.
    total = np.bincount(where, mass.sum(axis=1), minlength=len(rows))
    kept = before + _margin(table, total) < top_p * total
    for i in np.flatnonzero(~kept):
        row = int(rows[i])
        distance = distances(table.row(row), maxima[i].astype(np.float64), temperatures[i])
        whole = np.exp(distance).sum()
        gap = top_p[i] * whole - before[i]
        if abs(gap) > _margin(table, whole):
            kept[i] = gap > 0
        else:
            kept[i] = _in_nucleus_exactly(
                table.row(row), distance, int(tokens[i]), values[i], float(top_p[i])
            )
    return kept


def _margin(table: LogitTable, total: npt.NDArray[np.generic] | float) -> FloatArray:
    """More than the exact sums can differ from floating-point ones, in masses of the best token.

    Rounding to units moves a sum by at most half a unit a token. The rest covers np.exp and
    float64 sums ten thousand times over.
    """
    return np.asarray(table.vocabulary * (2.0 / MASS_UNITS) + 1e-9 * np.asarray(total))


def _in_nucleus_exactly(
    values: Values, distance: FloatArray, token: int, value: np.float32, top_p: float
) -> bool:
    mass = masses(distance)
    first = values > value
    first[:token] |= values[:token] == value
    return int(mass[first].sum()) < _limit(top_p, int(mass.sum()))


def _limit(top_p: float, total: int) -> int:
    """Least integer not below top_p * total, exactly: before < top_p * total iff before < it."""
    numerator, denominator = top_p.as_integer_ratio()
    return -(-numerator * total // denominator)
