"""Linear layers that read the same input, as one product with their outputs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashduet.packed_linear import PackedLinear

# [..., in] → [..., sum of out].
Product = Callable[[Tensor], Tensor]


class Joined:
    """The plain way: weights one under another."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        self.weight = torch.cat([part.weight for part in parts])
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def fused(parts: Sequence[nn.Linear], packed: bool, *, shared: bool = False) -> Product:
    """One product for serving, in the processor's own layout if `packed`.

    Where it is not, the parts' weights become views of the joined one, so that nothing is held
    twice; unless they are `shared` with another product.
    """
    if packed:
        return PackedLinear.of(*parts)
    joined = Joined(parts)
    if not shared:
        rows = [part.weight.shape[0] for part in parts]
        for part, view in zip(parts, joined.weight.split(rows), strict=True):
            part.weight = nn.Parameter(view, requires_grad=False)
    return joined
