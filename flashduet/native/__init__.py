"""Products of packed weights as machine code of our own, where a compiler and a processor allow it.

A C++ compiler takes a second for it, at the first start on a machine; the library is kept in the
user's cache. Everything works without it, slower: `native_product` gives None then, and the log
says why once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from flashduet.models_cache import cache_root

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-fPIC", "-shared")
_COMPILERS = ("g++", "clang++", "c++")
_COMPILER_TIMEOUT_S = 60
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
    try:
        path = _build()
        try:
            library = _open(path)
        except OSError:
            # Cut short, perhaps, when a machine went down.
            path.unlink(missing_ok=True)
            library = _open(_build())
    except (OSError, subprocess.SubprocessError, _Unusable) as error:
        log.info("products run without machine code of our own: %s", error)
        return None
    return library


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


class _Unusable(Exception):
    """Why there is no library."""


def _build() -> Path:
    made_of = [" ".join(_FLAGS), _processor()]
    made_of += [(_SOURCES / name).read_text() for name in ("product.h", "product.cpp")]
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    path = cache_root() / "products" / f"product-{digest[:16]}.so"
    if path.is_file():
        return path
    named = os.environ.get("CXX")
    names = (named, *_COMPILERS) if named else _COMPILERS
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise _Unusable("no C++ compiler was found")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".product-", dir=path.parent) as staging:
        made = Path(staging) / path.name
        arguments = [compiler, *_FLAGS, str(_SOURCES / "product.cpp"), "-o", str(made)]
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise _Unusable(f"{compiler} failed: {done.stderr.strip()[:300]}")
        # Others may be at it too; whoever comes last leaves the same.
        os.replace(made, path)
    return path


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return "\n".join(
        [platform.machine(), *sorted({line for line in lines if line.startswith("flags")})]
    )


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
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
        raise _Unusable("this processor multiplies no pairs of bfloat16 numbers (AVX512-BF16)")
    if torch.cpu._is_amx_tile_supported():
        raise _Unusable("PyTorch's own use this processor's matrix unit (AMX)")
    _check(library)
    return library


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
            raise _Unusable(f"its products are off by {float(error):.3g}")


def _aligned(tensor: Tensor) -> Tensor:
    """The same at an address that vectors can be loaded from."""
    if tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    room = torch.empty(tensor.numel() + _ALIGNMENT, dtype=tensor.dtype)
    skipped = -room.data_ptr() % _ALIGNMENT // tensor.element_size()
    copy = room[skipped : skipped + tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)
