"""The race of a row's tokens: argmax(logit / temperature + noise) over the filtered tokens.

Looked at are only the tokens that can win. The leader of each group of tokens has the group's
largest noise, known from one hash, so

    the best score is at least that of any leader and of the most likely token, and
    no token can score above its logit plus its group's largest noise.

A token whose second figure is below the best of the first loses whatever its own noise is. The
others, a few of 49,152 or some fifty where logits are nearly flat, get their noise computed and the
best of them wins. The figures may be computed with any rounding as long as they err to the safe
side (`_SLACK`); scores that decide are computed from the deterministic functions only.

Top-p is asked afterwards whether it keeps the winner. If it does, the winner over a superset lies
in the subset and so wins there too. If not, all tokens it keeps come before the loser in the order,
and the race is run again among those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flashduet.sampling.elementary import FloatArray, log
from flashduet.sampling.logit_table import LogitTable, Values
from flashduet.sampling.noise import (
    GROUP,
    Ids,
    exponentials,
    nearly_group_noise,
    nearly_gumbels,
    row_keys,
)
from flashduet.sampling.nucleus import Nucleus, distances, top_k_cuts
from flashduet.sampling.params import Sampling

# Far more than the nearly exact noise is off by (1e-11), far less than matters for speed.
_SLACK = 1e-9


class Race:
    """The races of some rows of a table, each with its own key and parameters (none greedy).

    Attributes:
        cut_values, cut_ends: [n], where the filters known so far end in each row (see Cut).
    """

    def __init__(
        self,
        table: LogitTable,
        rows: Sequence[int],
        positions: Sequence[int],
        samplings: Sequence[Sampling],
        choices: Sequence[int],
    ) -> None:
        self._table = table
        self._rows = np.array(rows, dtype=np.int64)
        self._maxima = table.maxima[self._rows].astype(np.float64)
        self._temperatures = np.array([s.temperature for s in samplings])
        self._top_p = np.array([s.top_p for s in samplings])
        self._least_distance = np.array(
            [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings]
        )
        self.cut_values = np.full(len(rows), -np.inf, dtype=np.float32)
        self.cut_ends = np.full(len(rows), table.vocabulary, dtype=np.int64)
        cut = [i for i, s in enumerate(samplings) if 0 < s.top_k < table.vocabulary]
        if cut:
            cuts = top_k_cuts(table, self._rows[cut], [samplings[i] for i in cut])
            self.cut_values[cut] = [c.value for c in cuts]
            self.cut_ends[cut] = [c.end for c in cuts]
            self._top_p[cut] = 1.0  # done within top-k
        self._nucleus = Nucleus(table, self._rows, self._temperatures, self._top_p)
        self._keys = row_keys([s.seed for s in samplings], choices, positions)
        groups = np.arange(table.group_maxima.shape[1])
        self._noise, self._leaders = nearly_group_noise(self._keys[:, None], groups[None, :])
        self._leader_values = table.values(self._rows, self._leaders)
        self._leader_distances = self._distances(self._leader_values)
        self._group_values = table.group_maxima[self._rows]
        self._group_distances = self._distances(self._group_values)
        # The most likely token is always kept; its distance is 0, so its score is its noise.
        favourites = table.first_maxima(self._rows)
        self._favourite_scores = nearly_gumbels(self._keys, favourites) - _SLACK

    def winners(self) -> Ids:
        """The token of each row."""
        tokens = np.empty(len(self._rows), dtype=np.int64)
        pending = np.arange(len(self._rows))
        while len(pending):
            tokens[pending], values = self._run(pending)
            asked = self._top_p[pending] < 1
            if not asked.any():
                break
            pending, values = pending[asked], values[asked]
            lost = ~self._nucleus.holds(pending, tokens[pending], values)
            pending = pending[lost]
            self.cut_values[pending], self.cut_ends[pending] = values[lost], tokens[pending]
        return tokens

    def _run(self, which: Ids) -> tuple[Ids, Values]:
        """Winners, and their logits, of the rows `which` among the tokens before their cuts."""
        each = which[:, None]
        leaders_count = self._allowed(
            each, self._leader_values[which], self._leader_distances[which], self._leaders[which]
        )
        least = self._leader_distances[which] + (self._noise[which] - _SLACK)
        best = np.where(leaders_count, least, -np.inf).max(axis=1)
        best = np.maximum(best, self._favourite_scores[which])

        most_noise = self._noise[which] + _SLACK
        at, groups = np.nonzero(
            (self._group_distances[which] + most_noise >= best[:, None])
            & (self._group_values[which] >= self.cut_values[each])
            & (self._group_distances[which] >= self._least_distance[each])
        )
        row, most_noise, best = which[at], most_noise[at, groups], best[at]
        values = self._table.group_values(self._rows[row], groups)
        pair, slot = np.nonzero(values >= self._least_values(row, best - most_noise)[:, None])

        row, values, ids = row[pair], values[pair, slot], groups[pair] * GROUP + slot
        distance = distances(values, self._maxima[row], self._temperatures[row])
        able = (distance + most_noise[pair] >= best[pair]) & self._allowed(
            row, values, distance, ids
        )
        at, row, values, ids = at[pair[able]], row[able], values[able], ids[able]
        scores = distance[able] - log(exponentials(self._keys[row], ids))
        # Rows come in order, each has its winner here, and ids ascend within a row: the first of
        # equal scores is the lowest id.
        highest = np.maximum.reduceat(scores, _first_of_each(at))
        winning = np.flatnonzero(scores == highest[at])
        winning = winning[_first_of_each(at[winning])]
        return ids[winning], values[winning]

    def _allowed(
        self, which: Ids, values: Values, distance: FloatArray, ids: Ids
    ) -> npt.NDArray[np.bool_]:
        """Whether the filters known so far keep tokens; `which` broadcasts against the others."""
        cut = self.cut_values[which]
        inside = (values > cut) | ((values == cut) & (ids < self.cut_ends[which]))
        return np.asarray(inside & (distance >= self._least_distance[which]))

    def _least_values(self, which: Ids, least_distances: FloatArray) -> Values:
        """Logits that distances of at least these need, rounded down far enough to be safe."""
        maxima = self._maxima[which]
        below = self._temperatures[which] * least_distances
        with np.errstate(over="ignore"):
            return (maxima + below - 1e-6 * (np.abs(maxima) + np.abs(below))).astype(np.float32)

    def _distances(self, values: Values) -> FloatArray:
        return distances(values, self._maxima[:, None], self._temperatures[:, None])


def _first_of_each(rows: Ids) -> Ids:
    """Indices where a sorted list of row numbers goes on to another row."""
    return np.flatnonzero(np.diff(rows, prepend=-1))
