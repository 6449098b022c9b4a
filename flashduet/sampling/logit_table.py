"""The logits of a step, in groups of token ids, with what the choice needs to look at few of them.

The wide tensor stays on its own device; only the groups' maxima and the few groups that are asked
for cross to the CPU, where all decisions are made by the same operations whatever the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flashduet.errors import FlashduetError
from flashduet.sampling.elementary import FloatArray
from flashduet.sampling.noise import GROUP, Ids
from flashduet.sampling.penalties import RowBlock, with_penalties

Values = npt.NDArray[np.float32]

# Types whose numbers are float32's too.
_EXACT = (torch.float32, torch.bfloat16, torch.float16)
# Below it the division could leave float32's range, and the best token has all the mass anyway.
LEAST_TEMPERATURE = 1e-6


class BadLogits(FlashduetError):
    """A model gave logits that no token can be chosen from: NaN, +inf, or -inf everywhere.

    `rows` are the indices of the rows concerned, so that an engine can fail those sessions only
    and choose again for the others.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        super().__init__(
            f"logits of row(s) {', '.join(map(str, rows))} hold NaN or +inf, or are all -inf"
        )


class LogitTable:
    """Logits [n, V] as float32, read by row and group of GROUP token ids.

    Args:
        logits: any float type, any device; never written to.
        blocks: whose rows they are, one block after the other, so that their bias and penalties
            are applied; without them the logits stay raw.

    Attributes:
        rows, vocabulary: n and V.
        group_maxima: [n, groups].
        maxima: [n], each row's largest logit.

    Raises:
        BadLogits: if a row has NaN, +inf or nothing but -inf.
        ValueError: if the tensor is not a two-dimensional float tensor with V > 0.
    """

    def __init__(self, logits: torch.Tensor, blocks: Sequence[RowBlock] = ()) -> None:
        check_shape(logits)
        self.rows, self.vocabulary = logits.shape
        groups = -(-self.vocabulary // GROUP)
        logits = with_penalties(logits.detach(), blocks)
        if self.vocabulary % GROUP:
            # -inf can never be chosen, so ids past the vocabulary need no case of their own.
            padded = logits.new_full((self.rows, groups * GROUP), -torch.inf, dtype=torch.float32)
            padded[:, : self.vocabulary] = logits
        elif logits.dtype in _EXACT and all(block.sampling.greedy for block in blocks):
            # Maxima are the same numbers in 16 bits, and of the rest next to nothing is read.
            padded = logits.contiguous()
        else:
            padded = logits.to(torch.float32).contiguous()
        self._groups = padded.view(self.rows * groups, GROUP)
        self._wide = padded
        self._groups_in_row = groups
        self.group_maxima: Values = (
            self._groups.amax(-1).view(self.rows, groups).float().cpu().numpy()  # hands NaN on
        )
        self.maxima: Values = self.group_maxima.max(axis=1)
        bad = np.flatnonzero(~np.isfinite(self.maxima))
        if len(bad):
            raise BadLogits(tuple(bad.tolist()))

    def group_values(self, rows: Ids, groups: Ids) -> Values:
        """Logits [len(rows), GROUP] of the given groups, one row index for each."""
        index = torch.from_numpy(rows * self._groups_in_row + groups)
        return self._groups.index_select(0, index.to(self._groups.device)).float().cpu().numpy()

    def values(self, rows: Ids, token_ids: Ids) -> Values:
        """Logits of token ids [len(rows), m]; -inf past the vocabulary."""
        flat = torch.from_numpy(rows[:, None] * (self._groups_in_row * GROUP) + token_ids)
        return self._groups.take(flat.to(self._groups.device)).float().cpu().numpy()

    def first_maxima(self, rows: Ids) -> Ids:
        """Lowest id of the largest logit of each row.

        NumPy promises the first of equal maxima, so the first group's first is it. torch.argmax
        promises it too, but reads the whole row once more, at five times the cost of all this.
        """
        groups = self.group_maxima[rows].argmax(axis=1)
        return groups * GROUP + self.group_values(rows, groups).argmax(axis=1)

    def softmax(
        self, rows: Ids, temperatures: FloatArray, logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Probabilities of whole rows at some temperatures, on the logits' device.

        In float32, whose error is small enough for what is decided elsewhere where it matters. A
        row's do not depend on the other rows.

        Args:
            rows, temperatures: [m]; rows ascending, temperatures of LEAST_TEMPERATURE and above.
            logits: `wide(rows)`, if it is at hand; it is overwritten.

        Returns:
            float32 [m, V or more], 0 past the vocabulary.
        """
        if logits is None and len(rows) == self.rows and (temperatures == 1).all():
            return self._wide.float().softmax(-1)
        logits = self.wide(rows) if logits is None else logits
        maxima = torch.from_numpy(self.maxima[rows]).to(logits.device)
        divisors = torch.from_numpy(temperatures).to(torch.float32).to(logits.device)
        return logits.sub_(maxima[:, None]).div_(divisors[:, None]).softmax(-1)

    def log_masses(self) -> FloatArray:
        """[n]: of each row the natural logarithm of the sum of exp(logit)."""
        best = self.softmax(np.arange(self.rows), np.ones(self.rows)).amax(-1).double()
        return np.asarray(self.maxima - best.log().cpu().numpy())

    def wide(self, rows: Ids) -> torch.Tensor:
        """Float32 logits [len(rows), V or more], on their device; -inf past the vocabulary."""
        index = torch.from_numpy(rows).to(self._groups.device)
        return self._wide.index_select(0, index).float()

    def row(self, row: int) -> Values:
        """All V logits of a row."""
        return self._wide[row, : self.vocabulary].float().cpu().numpy()

    def heads(self, rows: Ids, least: Values) -> list[tuple[Ids, Values]]:
        """Of each row the ids and logits of its tokens at `least` or above, -inf left out.

        Largest logits first, equal ones by id.
        """
        maxima = self.group_maxima[rows]
        at, groups = np.nonzero((maxima >= least[:, None]) & (maxima > -np.inf))
        found = self.group_values(rows[at], groups)
        pair, slot = np.nonzero((found >= least[at, None]) & (found > -np.inf))
        row, values, ids = at[pair], found[pair, slot], groups[pair] * GROUP + slot
        # Ids ascend within a row, and the sort is stable.
        order = np.lexsort((-values, row))
        ids, values = ids[order], values[order]
        ends = np.searchsorted(row, np.arange(1, len(rows)))
        return list(zip(np.split(ids, ends), np.split(values, ends), strict=True))

    def least_of_best(self, rows: Ids, count: int) -> Values:
        """Of each row a logit at or above which it has `count` tokens, if it has as many at all."""
        maxima = self.group_maxima[rows]
        if count >= maxima.shape[1]:
            return np.full(len(rows), -np.inf, dtype=np.float32)
        # The `count` best groups hold a token each at or above the least of their maxima.
        return np.asarray(np.partition(maxima, -count, axis=1)[:, -count])


def check_shape(logits: torch.Tensor) -> None:
    """Raises ValueError if the tensor is not a two-dimensional float tensor with V > 0."""
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be a float tensor [n, V] with V > 0, "
            f"{logits.dtype} {list(logits.shape)} given"
        )
