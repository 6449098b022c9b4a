"""The race of a row's tokens: argmax(logit / temperature + noise) over the filtered tokens.

Looked at are only the tokens that can win. The leader of each group of tokens has the group's
largest noise, known from one hash, so

    the best score is at least that of any leader, and
    no token can score above its logit plus its group's largest noise.

A token whose second figure is below the best of the first loses whatever its own noise is; the
others, typically a few dozen of 49,152, get their noise computed and the best of them wins. The
figures may be computed with any rounding as long as they err to the safe side (`_SLACK`); scores
that decide are computed from the deterministic functions only.

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
from flashduet.sampling.noise import GROUP, Ids, exponentials, group_noise, row_keys
from flashduet.sampling.nucleus import Cut, distances, in_nucleus, top_k_cut
from flashduet.sampling.params import Sampling

# Far more than np.log and our log can differ by (about 1e-14), far less than matters for speed.
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
        for i, sampling in enumerate(samplings):
            if 0 < sampling.top_k < table.vocabulary:
                self._cut(i, top_k_cut(table, int(self._rows[i]), sampling))
                self._top_p[i] = 1.0  # done within top-k
        self._keys = row_keys([s.seed for s in samplings], choices, positions)
        groups = np.arange(table.group_maxima.shape[1])
        least, self._leaders = group_noise(self._keys[:, None], groups[None, :])
        self._noise = -np.log(least)
        self._leader_values = table.values(self._rows, self._leaders)
        self._leader_distances = self._distances(self._leader_values)
        self._group_values = table.group_maxima[self._rows]
        self._group_distances = self._distances(self._group_values)

    def winners(self) -> Ids:
        """The token of each row."""
        tokens = np.empty(len(self._rows), dtype=np.int64)
        pending = np.arange(len(self._rows))
        while len(pending):
            tokens[pending], values = self._run(pending)
            asked = np.flatnonzero(self._top_p[pending] < 1)
            which = pending[asked]
            kept = in_nucleus(
                self._table,
                self._rows[which],
                tokens[which],
                values[asked],
                self._temperatures[which],
                self._top_p[which],
            )
            for i, value in zip(which[~kept], values[asked][~kept], strict=True):
                self._cut(i, Cut(float(value), int(tokens[i])))
            pending = which[~kept]
        return tokens

    def _run(self, which: Ids) -> tuple[Ids, Values]:
        """Winners, and their logits, of the rows `which` among the tokens before their cuts."""
        leading = self._allowed(
            which,
            self._leader_values[which],
            self._leader_distances[which],
            self._leaders[which],
        )
        sure = np.where(
            leading, self._leader_distances[which] + (self._noise[which] - _SLACK), -np.inf
        )
        best = sure.max(axis=1)
        highest = self._noise[which] + _SLACK
        open_groups = (
            (self._group_distances[which] + highest >= best[:, None])
            & (self._group_values[which] >= self.cut_values[which, None])
            & (self._group_distances[which] >= self._least_distance[which, None])
        )
        at, groups = np.nonzero(open_groups)
        values = self._table.group_values(self._rows[which[at]], groups)
        distance = distances(
            values, self._maxima[which[at], None], self._temperatures[which[at], None]
        )
        ids = groups[:, None] * GROUP + np.arange(GROUP)
        able = (
            (distance + highest[at, groups, None] >= best[at, None])
            & (distance > -np.inf)
            & self._allowed(which[at], values, distance, ids)
        )
        pair, slot = np.nonzero(able)
        row, token = at[pair], ids[pair, slot]
        score = distance[pair, slot] - log(exponentials(self._keys[which[row]], token))
        # Rows come in order and each has a token, its best one at least; ids ascend within a row,
        # so the first of equal scores is the lowest id.
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        highest_score = np.maximum.reduceat(score, starts)
        hits = np.flatnonzero(score == highest_score[row])
        won = hits[np.flatnonzero(np.diff(row[hits], prepend=-1))]
        return token[won], values[pair[won], slot[won]]

    def _allowed(
        self, which: Ids, values: Values, distance: FloatArray, ids: Ids
    ) -> npt.NDArray[np.bool_]:
        """Which of the tokens [len(which), m] come before the cuts of the rows `which`."""
        cut = self.cut_values[which, None]
        inside = (values > cut) | ((values == cut) & (ids < self.cut_ends[which, None]))
        return np.asarray(inside & (distance >= self._least_distance[which, None]))

    def _distances(self, values: Values) -> FloatArray:
        return distances(values, self._maxima[:, None], self._temperatures[:, None])

    def _cut(self, i: int, cut: Cut) -> None:
        self.cut_values[i], self.cut_ends[i] = cut.value, cut.end
