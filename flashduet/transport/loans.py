"""Records that a receiver reads where they lie, instead of copying them out.

Whoever holds the tensor holds the record: the sender gets its room back when the last view of the
tensor is gone, by a message that names the chunk. Until then it writes nothing there, so the tensor
is as good as a copy, for the price of room in the ring. That room is bounded: a reader that keeps
its tensors gets copies from then on, and the sender never has less than the rest of the ring.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from flashduet.transport.tensors import TensorLayout

# Smaller chunks are copied: that takes less time than another message about them.
LEAST_LENT_BYTES = 1 << 20
# At most this share of a ring is lent.
LENT_SHARE = 4


class Loans:
    """What one stream's receiver holds of its ring. For the stream's thread.

    Args:
        most_bytes: that may be lent at a time.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._sizes: dict[int, int] = {}
        # What tells of a loan's end; kept here until it has.
        self._watches: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}
        # Filled by these, in any thread and in the middle of anything: appending is one step of the
        # interpreter and needs no lock.
        self._ended: deque[int] = deque()

    @property
    def outstanding(self) -> int:
        """Loans whose end has not been collected."""
        return len(self._sizes)

    def may_begin(self, sequence: int, nbytes: int) -> bool:
        """Whether a record of that many bytes can be lent now."""
        if nbytes < LEAST_LENT_BYTES or sequence in self._sizes:
            return False
        return sum(self._sizes.values()) + nbytes <= self._most

    def begin(
        self, sequence: int, memory: npt.NDArray[np.uint8], layout: TensorLayout
    ) -> torch.Tensor:
        """A tensor over `memory`, to which nothing else refers: the loan ends with its views."""
        self._sizes[sequence] = memory.nbytes
        ended = self._ended
        self._watches[sequence] = weakref.ref(memory, lambda _: ended.append(sequence))
        return torch.from_numpy(memory).view(layout.dtype).view(layout.rows, layout.width)

    def collect(self) -> list[int]:
        """Sequences of the loans that have ended since the last call."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        for sequence in ended:
            del self._sizes[sequence], self._watches[sequence]
        return ended
