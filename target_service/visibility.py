"""Which earlier positions a layer's queries see: all, a sliding window, or their own chunk.

The rule is read off the mask function that Transformers makes for the layer, by asking it for
positions; nothing depends on a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# (batch index, head index, query positions, key positions) to whether the query sees the key.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Visibility:
    """A query at position q sees key k iff k <= q, and within the window or chunk where given.

    Attributes:
        window: tokens seen, the query's own included.
        chunk: positions are cut into chunks of this size; only the query's own is seen.
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """Lowest position that a query at `position`, or a later one in its block, may see."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position - position % self.chunk
        return 0

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Boolean for positions that broadcast against each other."""
        seen = keys <= queries
        if self.window is not None:
            seen &= keys > queries - self.window
        if self.chunk is not None:
            seen &= keys // self.chunk == queries // self.chunk
        return seen

    def mask(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """What to add to scores of positions that broadcast: 0 where seen, else -inf."""
        seen = self.sees(queries, keys)
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def recognize(function: MaskFunction, sizes: Iterable[int]) -> Visibility | None:
    """The rule that a mask function follows; None when it is none of those above.

    Args:
        sizes: window or chunk sizes that the model's config or layers name.
    """
    candidates = [Visibility()]
    for size in sorted(set(sizes)):
        candidates += [Visibility(window=size), Visibility(chunk=size)]
    positions = _telling_positions(sizes)
    queries, keys = positions.unsqueeze(1), positions.unsqueeze(0)
    zero = torch.zeros((), dtype=torch.int64)
    given = function(zero, zero, queries, keys).expand(len(positions), len(positions))
    for candidate in candidates:
        if torch.equal(given, candidate.sees(queries, keys)):
            return candidate
    return None


def _telling_positions(sizes: Iterable[int]) -> Tensor:
    """Positions around every border that a window or chunk of these sizes could have."""
    borders = {0, 1, 2, 3, 17, 1000}
    for size in sizes:
        borders |= {size * times + shift for times in (1, 2, 3) for shift in (-1, 0, 1, 2)}
    return torch.tensor(sorted(position for position in borders if position >= 0))
