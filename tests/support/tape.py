"""What a CUDA graph does, on the CPU: operators written down once and then repeated as they were.

No Python of the function runs again, numbers that were Python's stay as they were, results land
where they first did, waiting for a number is refused, and what lay between the first and the last
operator is spoilt after every run, as other recordings' work would spoil it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class TapeRecorder:
    """A `Recorder` that counts.

    Attributes:
        made: recordings so far.
        replayed: runs of them.
        nbytes: what it claims to take.
        fail_from: the recording from which on it refuses, as a device without memory would.
    """

    def __init__(self) -> None:
        self.made = 0
        self.replayed = 0
        self.nbytes = 0
        self.fail_from: int | None = None

    def rehearse(self, function: Callable[[], None]) -> None:
        with _Tape():
            function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        if self.fail_from is not None and self.made >= self.fail_from:
            raise RuntimeError("out of memory, says the test\nand more lines")
        tape = _Tape()
        with tape:
            function()
        tape.spoil()
        self.made += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # An operator, its arguments, and what it gave that lies in memory of its own.
        self._calls: list[tuple[Any, Any, dict[str, Any], list[Tensor | None]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [
            leaf if isinstance(leaf, Tensor) and _memory(leaf) not in given else None
            for leaf in tree_leaves(result)
        ]
        # A view stays where it is.
        if func._schema.is_mutable or any(tensor is not None for tensor in fresh):
            self._calls.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, fresh in self._calls:
                result = func(*args, **kwargs)
                for before, now in zip(fresh, tree_leaves(result), strict=True):
                    if before is not None:
                        before.copy_(now)
        self.spoil()

    def spoil(self) -> None:
        with torch.inference_mode():
            for *_, fresh in self._calls:
                for tensor in fresh:
                    if tensor is not None and tensor.is_floating_point():
                        tensor.fill_(torch.nan)


def _memory(tensor: Tensor) -> int:
    # Packed weights have no storage that can be asked.
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@contextmanager
def unrecorded(packed: Any) -> Iterator[None]:
    """Let passes run without recordings."""
    graphs, packed.graphs = packed.graphs, None
    try:
        yield
    finally:
        packed.graphs = graphs
