"""A model's linear layers and nothing else: the least that a step of it can cost.

Compiled with frozen weights where there is a compiler, because that is how fast they can be made
without leaving PyTorch; and as the engine itself lays them out, each layer a product of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashduet.packed_linear import PackedLinear, can_pack

COMPILED, PACKED, PLAIN = "compiled", "packed", "plain"


class _AllLinears(nn.Module):
    """Every linear layer once, on an input of its own width."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: dict[int, Tensor]) -> list[Tensor]:
        return [layer(inputs[layer.in_features]) for layer in self.layers]  # type: ignore[index]


class BareLinears:
    """Runs the linear layers of a model, with rows of noise of the right width.

    Args:
        model: only its layers are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if type(module) is nn.Linear]
        self.count = len(layers)
        self._dtype = layers[0].weight.dtype
        self._widths = sorted({layer.in_features for layer in layers})
        self._module = _AllLinears(layers).eval().requires_grad_(False)
        self._packed = (
            [PackedLinear.of(layer) for layer in layers]
            if can_pack(self._dtype, torch.device("cpu"))
            else []
        )
        self._run: Callable[[dict[int, Tensor]], Any] = self._module
        self._inputs: dict[int, dict[int, Tensor]] = {}

    def prepare(self, tokens: int) -> str:
        """Compile for so many rows; how it will run: compiled, or else packed or plain."""
        import torch._inductor.config as inductor

        kind = COMPILED
        inductor.freezing = True
        try:
            self._run = torch.compile(self._module, dynamic=False)
            self.run(tokens)
        except Exception:  # no compiler, or one that fails: of whatever kind its errors are
            self._run, kind = self._module, PACKED if self._packed else PLAIN
            if self._packed:
                self._run = self._one_by_one
        self.run(tokens)
        return kind

    @torch.inference_mode(False)
    def run(self, tokens: int) -> None:
        with torch.no_grad():
            self._run(self._input(tokens))

    def run_packed(self, tokens: int) -> None:
        """The engine's own products, one a layer."""
        with torch.inference_mode():
            self._one_by_one(self._input(tokens))

    def _one_by_one(self, inputs: dict[int, Tensor]) -> list[Tensor]:
        return [layer(inputs[layer.in_features]) for layer in self._packed]

    def _input(self, tokens: int) -> dict[int, Tensor]:
        if tokens not in self._inputs:
            self._inputs[tokens] = {
                width: torch.randn(tokens, width).to(self._dtype) for width in self._widths
            }
        return self._inputs[tokens]
