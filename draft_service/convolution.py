"""DFlash 2's grouped dynamic causal convolution, around a layer's attention and its MLP.

From a sub-layer's input h [.., q, H] one projection makes two kernels for every position. The first
convolves the input, the second the sub-layer's output:

    y[p] = sum over o < K of (base[o] + dynamic[p, o, group]) * x[p - o]

with a base for each channel and a dynamic part for each group of channels, and zeros before the
block's first slot.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GroupedCausalConvolution(nn.Module):
    """Both convolutions around one sub-layer.

    Args:
        kernel_size: K, positions that one output sees.
        group_size: channels that share a dynamic kernel; divides hidden_size.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.shape = (2, kernel_size, hidden_size // group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, hidden_size))
        outputs = 2 * kernel_size * (hidden_size // group_size)
        self.kernel_projection: nn.Module = nn.Linear(hidden_size, outputs, bias=False)
        self.skipped = False
        """Changes nothing, so that nobody need compute it."""

    def skip_if_identity(self) -> None:
        """A checkpoint with a selector must have convolutions; these may do nothing."""
        base = self.base_kernel
        others = [base[:, 1:], *self.kernel_projection.parameters()]
        nothing = bool((base[:, 0] == 1).all()) and not any(bool(x.any()) for x in others)
        self.skipped = nothing
        if nothing:
            self.requires_grad_(False)

    @torch.no_grad()
    def make_identity(self) -> None:
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1
        for weight in self.kernel_projection.parameters():
            weight.zero_()

    def before(self, h: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sub-layer's input [..., q, H] → it convolved, and the kernel for `after`.

        Args:
            slots: int64 [..., q], each row's place in its block, where several blocks follow one
                another along q; None: the rows are one block.
        """
        kernels = self.kernel_projection(h).unflatten(-1, self.shape)
        first, second = kernels.unbind(-3)
        return _convolve(h, self.base_kernel[0], first, slots), second

    def after(self, output: Tensor, kernel: Tensor, slots: Tensor | None) -> Tensor:
        """The sub-layer's output [..., q, H], convolved."""
        return _convolve(output, self.base_kernel[1], kernel, slots)


def _convolve(x: Tensor, base: Tensor, dynamic: Tensor, slots: Tensor | None) -> Tensor:
    """x [..., q, H], base [K, H], dynamic [..., q, K, groups] → [..., q, H]."""
    groups = dynamic.shape[-1]
    parts = x.unflatten(-1, (groups, -1))
    bases = base.to(x.dtype).unflatten(-1, (groups, -1))
    result = torch.zeros_like(parts)
    for offset in range(min(base.shape[0], x.shape[-2])):
        shifted = parts
        if offset:
            shifted = functional.pad(parts[..., :-offset, :, :], (0, 0, 0, 0, offset, 0))
            if slots is not None:
                shifted = shifted * (slots >= offset)[..., None, None]
        result = result + bases[offset] * shifted
        result = torch.addcmul(result, dynamic[..., offset, :, None], shifted)
    return result.flatten(-2)
