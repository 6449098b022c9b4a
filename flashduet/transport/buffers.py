"""Memory for tensors that come and go: given out again when nothing reads them any more.

A fresh tensor of a megabyte costs more in page faults than the copy into it. These are kept until
their last view is gone, wherever it went, and then used for the next one.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from flashduet.transport.ring import ALIGNMENT
from flashduet.transport.tensors import TensorLayout

_Bytes = npt.NDArray[np.uint8]

# Smaller ones are cheaper from the allocator, which keeps them itself.
_LEAST_BYTES = 256 << 10
# A buffer is used for tensors of at least this share of it.
_LEAST_SHARE = 4


class Buffers:
    """Gives out CPU tensors; usable from any thread.

    Args:
        most_bytes: of memory kept for later while nobody uses it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        # Appending and removing are each one step of the interpreter, so no lock is needed in a
        # finalizer, which may run in the middle of anything.
        self._idle: deque[_Bytes] = deque()

    @property
    def idle_bytes(self) -> int:
        """Kept and not in use."""
        return sum(each.nbytes for each in tuple(self._idle))

    def tensor(self, layout: TensorLayout) -> torch.Tensor:
        """A tensor [rows, width] of any content, whose memory nothing else refers to."""
        if layout.nbytes < _LEAST_BYTES:
            return torch.empty(layout.rows, layout.width, dtype=layout.dtype)
        memory = self._take(layout.nbytes)
        start = -memory.ctypes.data % ALIGNMENT
        view = memory[start : start + layout.nbytes]
        # torch keeps `view` as long as any tensor over it lives; then its memory is idle again.
        tensor = torch.from_numpy(view).view(layout.dtype).view(layout.rows, layout.width)
        weakref.finalize(view, self._give_back, memory).atexit = False
        return tensor

    def _take(self, nbytes: int) -> _Bytes:
        wanted = nbytes + ALIGNMENT
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread was faster
                break
            if wanted <= memory.nbytes <= wanted * _LEAST_SHARE:
                return memory
            self._idle.append(memory)
        return np.empty(wanted, dtype=np.uint8)

    def _give_back(self, memory: _Bytes) -> None:
        if self.idle_bytes + memory.nbytes <= self._most:
            # The one used last is the one still in the processor's cache.
            self._idle.appendleft(memory)
