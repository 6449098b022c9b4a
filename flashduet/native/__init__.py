"""Products of packed weights as machine code of our own, where a compiler and a processor allow it.

Everything works without it, slower: `native_product` gives None then, and the log says why once.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from flashduet.native.building import LibrarySource, Unusable, load_library

_FOLDER = Path(__file__).parent
_SOURCE = LibrarySource("product", [_FOLDER / "product.h", _FOLDER / "product.cpp"], ["-fopenmp"])
_OUTPUTS = 32
_ALIGNMENT = 64
# Products of small numbers in bfloat16, summed in another order.
_TOLERANCE = 0.02


class NativeProduct:
    """x [..., in] to [..., out] in bfloat16, by weights that are packed here.

    What a row gives does not depend on the other rows.

    Args:
        weight: [out, in], bfloat16 on the CPU; `fits` it.
        library: as `load` gives it.
    """

    def __init__(self, weight: Tensor, library: ctypes.CDLL) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = _aligned(pack(weight))
        self._address = self._weight.data_ptr()
        self._library = library

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{x.dtype} {list(x.shape)} given, bfloat16 [..., {self.in_features}] expected"
            )
        return _multiply(self._library, x, self._address, self.out_features)


def _multiply(library: ctypes.CDLL, x: Tensor, address: int, outputs: int) -> Tensor:
    x, inputs = x.contiguous(), x.shape[-1]
    out = x.new_empty((*x.shape[:-1], outputs))
    library.flashduet_product(
        x.data_ptr(),
        x.numel() // inputs,
        inputs,
        address,
        out.data_ptr(),
        outputs,
        torch.get_num_threads(),
    )
    return out


def fits(weight: Tensor) -> bool:
    """Whether there is native code for such weights, were there a library."""
    outputs, inputs = weight.shape
    of_type = weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
    return of_type and outputs > 0 and outputs % _OUTPUTS == 0 and inputs > 0 and inputs % 2 == 0


def native_product(weight: Tensor) -> NativeProduct | None:
    """The weights' product as machine code, or None where it cannot be had."""
    if not fits(weight) or (library := load()) is None:
        return None
    return NativeProduct(weight, library)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled if need be; None where there is none, and the log says why."""
    return load_library(_SOURCE, _prepare, "products run")


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] that `fits`, as it is read: [out / 32, in / 2, 32, 2]."""
    pairs = weight.view(-1, _OUTPUTS, weight.shape[1] // 2, 2)
    return pairs.permute(0, 2, 1, 3).contiguous()


def _operator(x: Tensor, weight: Tensor) -> Tensor:
    library = load()
    if library is not None:
        return _multiply(library, x, weight.data_ptr(), weight.shape[0] * _OUTPUTS)
    outputs = weight.permute(0, 2, 1, 3).reshape(-1, x.shape[-1])
    return functional.linear(x, outputs)


def _operator_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] * _OUTPUTS))


# For graphs: x [..., in] and a weight of `pack`. Computed here where no library brings its kernel.
_library = torch.library.Library("flashduet", "FRAGMENT")
_library.define("product(Tensor x, Tensor weight) -> Tensor")
_library.impl("product", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("flashduet::product", _operator_shape, lib=_library)


def _prepare(library: ctypes.CDLL) -> None:
    library.flashduet_product.restype = None
    library.flashduet_product.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
    ]
    if not library.flashduet_supported():
        raise Unusable("this processor multiplies no pairs of bfloat16 numbers (AVX512-BF16)")
    if torch.cpu._is_amx_tile_supported():
        raise Unusable("PyTorch's own use this processor's matrix unit (AMX)")
    _check(library)


def _check(library: ctypes.CDLL) -> None:
    """Whether it computes what PyTorch does."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 70, generator=generator).bfloat16()
    product = NativeProduct(weight, library)
    for rows in (1, 5, 19):
        x = torch.randn(rows, 70, generator=generator).bfloat16()
        wanted = functional.linear(x.float(), weight.float())
        error = (product(x).float() - wanted).abs().max() / wanted.abs().max()
        if not error < _TOLERANCE:
            raise Unusable(f"its products are off by {float(error):.3g}")


def _aligned(tensor: Tensor) -> Tensor:
    """The same at an address that vectors can be loaded from."""
    if tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    room = torch.empty(tensor.numel() + _ALIGNMENT, dtype=tensor.dtype)
    skipped = -room.data_ptr() % _ALIGNMENT // tensor.element_size()
    copy = room[skipped : skipped + tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)
