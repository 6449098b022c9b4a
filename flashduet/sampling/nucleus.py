"""The filters as prefixes of one order: which tokens of a row may be chosen.

Tokens are ordered by logit, largest first, equal ones by id. Top-k, top-p and min-p each keep a
prefix of that order, so all together they do, and a prefix is named by where it ends (`Cut`).

Top-p needs sums of probabilities over the vocabulary. They are sums of integers, the mass
round(2^40 exp((logit - largest) / temperature)), so they are exact, do not depend on any order of
summation, and the border falls in the same place in any batch. A token is kept iff the mass before
it is less than top_p times the total, which keeps at least the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flashduet.sampling.elementary import FloatArray, exp
from flashduet.sampling.logit_table import LEAST_TEMPERATURE, LogitTable, Values
from flashduet.sampling.noise import GROUP, Ids
from flashduet.sampling.params import Sampling

MASS_UNITS = 2.0**40
# exp(-64) is less than half a unit, so nothing is lost where exp's argument is held up here.
_LEAST_DISTANCE = -64.0
# More, relative to the total, than float32 sums over a row differ from exact ones: 64 units in the
# last place of exp's argument at most, where its value counts, and some tens of exp and of the sum.
_ROW_MARGIN = 5e-5
# In a row of any size, so many groups are always worth picking out.
_FEW_GROUPS = 8


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


def top_k_cuts(table: LogitTable, rows: Ids, samplings: Sequence[Sampling]) -> list[Cut]:
    """Where top-k, and top-p within it, end in each row; every top_k must be 1 to V - 1."""
    least = np.array(
        [
            table.least_of_best(rows[i : i + 1], sampling.top_k)[0]
            for i, sampling in enumerate(samplings)
        ]
    )
    return [
        _top_k_cut(ids, values, sampling)
        for (ids, values), sampling in zip(table.heads(rows, least), samplings, strict=True)
    ]


def _top_k_cut(ids: Ids, values: Values, sampling: Sampling) -> Cut:
    """The cut in a row's best tokens, in order. -inf tokens are not among them: never chosen."""
    ids, values = ids[: sampling.top_k], values[: sampling.top_k]
    last = len(ids) - 1
    if sampling.top_p < 1:
        mass = masses(distances(values, float(values[0]), sampling.temperature))
        before = np.cumsum(mass) - mass
        last = int(np.searchsorted(before, _limit(sampling.top_p, int(mass.sum())))) - 1
    return Cut(float(values[last]), int(ids[last]) + 1)


class Nucleus:
    """Tells whether top-p keeps a token, for some rows of a table.

    Floating-point sums with a bound on their error decide nearly always, from the groups that can
    hold a token before the one in question, or else from the whole row; exact sums decide the rest.
    The answer is always that of the exact sums.
    """

    def __init__(
        self, table: LogitTable, rows: Ids, temperatures: FloatArray, top_p: FloatArray
    ) -> None:
        self._table, self._rows = table, rows
        self._maxima = table.maxima[rows].astype(np.float64)
        self._temperatures, self._top_p = temperatures, top_p

    def holds(self, which: Ids, tokens: Ids, values: Values) -> npt.NDArray[np.bool_]:
        """Is the token, with its logit, of each of the rows `which` (indices into `rows`) kept?"""
        top_p = self._top_p[which]
        relevant = self._table.group_maxima[self._rows[which]] >= values[:, None]
        # Where they are many, adding up the whole row is cheaper and decides for sure.
        few = max(_FEW_GROUPS, relevant.shape[1] // 4)
        relevant &= relevant.sum(axis=1, keepdims=True) <= few
        at, groups = np.nonzero(relevant)
        found = self._table.group_values(self._rows[which[at]], groups)
        row = which[at, None]
        mass = np.exp(distances(found, self._maxima[row], self._temperatures[row]))
        # Mass not looked at can only make the total larger.
        total = _sums(at, mass.sum(axis=1), len(which))
        pair, slot = np.nonzero(found == values[at, None])
        ties = groups[pair] * GROUP + slot < tokens[at[pair]]
        mass[found <= values[at, None]] = 0.0
        before = _sums(at, mass.sum(axis=1), len(which))
        own = np.exp(distances(values, self._maxima[which], self._temperatures[which]))
        before += own * _sums(at[pair], ties, len(which))
        kept = before + self._margin(total) < top_p * total
        rest = np.flatnonzero(~kept & relevant.any(axis=1))
        if len(rest):
            # Each of the other groups has at least the mass of its largest logit.
            total = total[rest] + self._least_masses(which[rest], ~relevant[rest])
            kept[rest] = before[rest] + self._margin(total) < top_p[rest] * total
        rest = np.flatnonzero(~kept)
        if len(rest):
            kept[rest] = self._hold_by_rows(which[rest], tokens[rest], values[rest])
        return np.asarray(kept)

    def _least_masses(self, which: Ids, groups: npt.NDArray[np.bool_]) -> FloatArray:
        """Of each row what `groups` [len(which), all] have at least together, by their maxima."""
        maxima = self._table.group_maxima[self._rows[which]]
        row = which[:, None]
        mass = np.exp(distances(maxima, self._maxima[row], self._temperatures[row]))
        return np.asarray((mass * groups).sum(axis=1))

    def _hold_by_rows(self, which: Ids, tokens: Ids, values: Values) -> npt.NDArray[np.bool_]:
        """As `holds`, by adding up whole rows in float32; exact sums where that can't tell."""
        top_p, rows = self._top_p[which], self._rows[which]
        logits = self._table.wide(rows)
        first = logits >= torch.from_numpy(values).to(logits.device)[:, None]
        for row, token in enumerate(tokens.tolist()):
            first[row, token:] = logits[row, token:] > float(values[row])
        mass = self._table.softmax(
            rows, np.maximum(self._temperatures[which], LEAST_TEMPERATURE), logits
        )
        total = mass.sum(-1).double().cpu().numpy()
        gap = top_p * total - mass.mul_(first).sum(-1).double().cpu().numpy()
        kept = gap > 0
        unsure = ~(np.abs(gap) > _ROW_MARGIN * total)
        unsure |= self._temperatures[which] < LEAST_TEMPERATURE
        for i in np.flatnonzero(unsure):
            kept[i] = self._holds_exactly(int(which[i]), int(tokens[i]), values[i])
        return np.asarray(kept)

    def _holds_exactly(self, i: int, token: int, value: np.float32) -> bool:
        values = self._table.row(int(self._rows[i]))
        mass = masses(self._distances(i, values))
        first = values > value
        first[:token] |= values[:token] == value
        return int(mass[first].sum()) < _limit(float(self._top_p[i]), int(mass.sum()))

    def _distances(self, i: int, values: Values) -> FloatArray:
        return distances(values, float(self._maxima[i]), float(self._temperatures[i]))

    def _margin(self, total: FloatArray) -> FloatArray:
        """More than exact sums can differ from floating-point ones, in masses of the best token.

        Rounding to units moves a sum by at most half a unit a token. The rest covers np.exp and
        float64 sums thousands of times over.
        """
        return self._table.vocabulary * (2.0 / MASS_UNITS) + 1e-9 * total


def _sums(rows: Ids, values: npt.NDArray[np.generic], number: int) -> FloatArray:
    """For each of `number` rows the sum of its values."""
    # Without a value, bincount forgets the type of its weights.
    return np.bincount(rows, values, minlength=number).astype(np.float64)


def _limit(top_p: float, total: int) -> int:
    """Least integer not below top_p * total, exactly: before < top_p * total iff before < it."""
    numerator, denominator = top_p.as_integer_ratio()
    return -(-numerator * total // denominator)
