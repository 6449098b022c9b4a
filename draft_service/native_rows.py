"""Norms and rotation of a serving network's rows as machine code of our own (`native/rows.cpp`).

A proposal has some ten rows, and an operator of PyTorch's takes longer to be found than to be
computed, the more so with cold caches. On CPUs in bfloat16, where there is a compiler; elsewhere
the layers compute the same by PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from flashduet.native.building import LibrarySource, Unusable, load_library

_SOURCE = LibrarySource("row", [Path(__file__).parent / "native" / "rows.cpp"], ["-fopenmp-simd"])
_TOLERANCE = 0.02


class RowKernels:
    """Functions of rows on the CPU in bfloat16; nothing here can be differentiated.

    Args:
        library: as `row_kernels` prepares it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size] / sqrt(mean(x²) + eps) · weight [size]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._library.flashduet_rms_norm(
            x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, out.data_ptr()
        )
        return out

    def norm_and_rotate(
        self, x: Tensor, offsets: Tensor, weights: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        """Norm and rotate heads of x [..., width] in place.

        Args:
            x: contiguous.
            offsets: int64 [heads], where in a row each begins.
            weights: [heads, size], contiguous, of the norms.
            cos, sin: [..., 1, size] of `angles`; broadcast where there are fewer than rows.
        """
        width = x.shape[-1]
        rows = x.numel() // width
        heads, size = weights.shape
        if cos.numel() != rows * size:
            cos, sin = (each.expand(*x.shape[:-1], 1, size).contiguous() for each in (cos, sin))
        self._library.flashduet_norm_and_rotate(
            x.data_ptr(),
            rows,
            width,
            offsets.data_ptr(),
            heads,
            size,
            weights.data_ptr(),
            eps,
            cos.data_ptr(),
            sin.data_ptr(),
        )

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, d] of int64 positions [...] by frequencies, float32 [d / 2]."""
        positions = positions.contiguous()
        half = len(frequencies)
        shape = (*positions.shape, 1, 2 * half)
        cos, sin = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
        self._library.flashduet_angles(
            positions.data_ptr(),
            positions.numel(),
            frequencies.data_ptr(),
            half,
            scale,
            cos.data_ptr(),
            sin.data_ptr(),
        )
        return cos, sin


@functools.cache
def row_kernels() -> RowKernels | None:
    """The machine code, compiled if need be; None where there is none, and the log says why."""
    library = load_library(_SOURCE, _prepare, "a drafter's rows are computed")
    return None if library is None else RowKernels(library)


def kernels_for(weight: Tensor) -> RowKernels | None:
    """Those for a network with such weights, if there are any."""
    fits = weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
    return row_kernels() if fits else None


def _prepare(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, Sequence[type]] = {
        "rms_norm": [pointer, pointer, number, number, ctypes.c_float, pointer],
        "norm_and_rotate": [
            *[pointer, number, number, pointer, number, number, pointer],
            *[ctypes.c_float, pointer, pointer],
        ],
        "angles": [pointer, number, pointer, number, ctypes.c_float, pointer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, f"flashduet_{name}")
        function.restype, function.argtypes = None, list(arguments)
    _check(RowKernels(library))


def _check(kernels: RowKernels) -> None:
    """Whether it computes what PyTorch does."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((5, 70), (70,)))
    wanted = rms_norm(x.float(), (70,), weight.float(), 1e-6)
    _compare(kernels.rms_norm(x, weight, 1e-6), wanted)
    positions, frequencies = torch.arange(300, 305), torch.rand(35, generator=generator)
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)[:, None]
    cos, sin = kernels.angles(positions, frequencies, 1.5)
    _compare(cos, angles.cos() * 1.5)
    _compare(sin, angles.sin() * 1.5)
    first, second = wanted.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    wanted = wanted * cos[:, 0].float() + turned * sin[:, 0].float()
    kernels.norm_and_rotate(x, torch.zeros(1, dtype=torch.int64), weight[None], 1e-6, cos, sin)
    _compare(x, wanted)


def _compare(given: Tensor, wanted: Tensor) -> None:
    error = (given.float() - wanted).abs().max() / wanted.abs().max()
    if not error < _TOLERANCE:
        raise Unusable(f"its rows are off by {float(error):.3g}")
