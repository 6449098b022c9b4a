"""Linear layers with weights laid out for the CPU's matrix kernels once, at load.

PyTorch's own linear lays the weights out anew in every call, which for few rows costs more than
the product: on AVX512-BF16 cores one row through 576 x 49,152 takes 2.6 ms plainly and 0.7 ms
packed by oneDNN in bfloat16, 6.8 and 1.4 ms in float32. Where there is a compiler and such a
processor, bfloat16 weights are packed for machine code of our own instead (`flashduet.native`).
Layers that read the same input share one product where a model's own forward shows that they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flashduet.native import fits, native_product, pack

_ops = torch.ops.mkldnn
# The overload itself: choosing it anew costs as much as the rest of the call.
_linear = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """y = x W^T + b for inference on the CPU: x [..., in] to [..., out].

    Holds the packed copy alone; the weights that it was made of are not kept.

    Args:
        weights: [out_i, in] each, of one element type; several are one product, in order.
        biases: [out_i] each, or None for none at all.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> None:
        super().__init__()
        joined = torch.cat([weight.detach() for weight in weights]).contiguous()
        self.out_features, self.in_features = joined.shape
        self.sizes = tuple(weight.shape[0] for weight in weights)
        self.dtype = joined.dtype
        # Machine code of our own reads weights faster than PyTorch's, and twice is once too often.
        self._native = native_product(joined)
        self._packed = None
        if self._native is None:
            self._packed = _ops._reorder_linear_weight(joined, None)
        self._bias = _join(weights, biases)
        self.nbytes = joined.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @classmethod
    def of(cls, *layers: nn.Module) -> PackedLinear:
        """Pack linear layers; several share one product, their outputs side by side."""
        parts = [_parts(layer) for layer in layers]
        return cls([weight for weight, _ in parts], [bias for _, bias in parts])

    def forward(self, x: Tensor) -> Tensor:
        if self._native is not None:
            y = self._native(x)
            return y if self._bias is None else y.add_(self._bias)
        return _linear(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]

    # Without nn.Module's own call, which looks for hooks: there are several of these in each layer.
    __call__ = forward

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class JoinedLinear(nn.Linear):
    """Sibling layers as one plain linear layer, for a compiler that packs weights itself."""

    def __init__(self, *layers: nn.Module) -> None:
        parts = [_parts(layer) for layer in layers]
        weight = torch.cat([weight.detach() for weight, _ in parts])
        bias = _join([weight for weight, _ in parts], [bias for _, bias in parts])
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.sizes = tuple(weight.shape[0] for weight, _ in parts)


class GraphLinear(nn.Module):
    """A linear layer as the operator `flashduet::product`, for graphs."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        self.sizes: tuple[int, ...] = getattr(layer, "sizes", (self.out_features,))
        self.weight = nn.Parameter(pack(layer.weight.detach()), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.flashduet.product(x, self.weight)
        return y if self.bias is None else y + self.bias


class SharedInput:
    """Sibling layers as one product, computed for the first of them that is called.

    Whether the siblings read the same input is checked in every pass, by the tensor itself: a
    sibling that is given another one computes it on its own.
    """

    def __init__(self, product: PackedLinear | JoinedLinear | GraphLinear) -> None:
        self.product = product
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] = ()

    def take(self, index: int, x: Tensor) -> Tensor:
        """Output of sibling `index` for x; its columns of the product, not contiguous."""
        if x is not self._input:
            self._outputs = torch.split_with_sizes(self.product(x), self.product.sizes, -1)
            self._input = x
        output = self._outputs[index]
        if index == len(self._outputs) - 1:
            # Siblings are called in order; what they shared is let go with the last.
            self._input, self._outputs = None, ()
        return output


class SharedLinear(nn.Module):
    """One of the siblings of a `SharedInput`."""

    def __init__(self, shared: SharedInput, index: int, layer: nn.Module) -> None:
        super().__init__()
        weight, _ = _parts(layer)
        self.out_features, self.in_features = weight.shape
        self.shared, self._index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.take(self._index, x)

    __call__ = forward


@dataclass(frozen=True, slots=True)
class PackingReport:
    """What `pack_linears` did.

    Attributes:
        layers: linear layers packed, those in products of several included.
        products: products left of them.
        nbytes: bytes of the packed copies.
    """

    layers: int
    products: int
    nbytes: int


def products(model: nn.Module) -> list[PackedLinear]:
    """All packed products of a model that `pack_linears` went through."""
    alone = [module for module in model.modules() if isinstance(module, PackedLinear)]
    shared = {
        id(module.shared): module.shared.product
        for module in model.modules()
        if isinstance(module, SharedLinear)
    }
    packed = [product for product in shared.values() if isinstance(product, PackedLinear)]
    return [*alone, *packed]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and processor have the packed kernels for a type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(_ops._is_mkldnn_fp16_supported())
    return dtype is torch.float32


@torch.inference_mode()
def pack_linears(model: nn.Module, probe: Callable[[], object]) -> PackingReport:
    """Swap the model's linear layers for packed ones, in place; the old weights are let go.

    Weights that another module uses too, such as a tied embedding, stay with it.

    Args:
        probe: runs the model once; shows which layers read the same tensor.
    """
    groups = _siblings(model, probe)
    places = _places(model)
    nbytes = 0
    for group in groups:
        product = PackedLinear.of(*group)
        nbytes += product.nbytes
        if len(group) == 1:
            parent, name = places[id(group[0])]
            setattr(parent, name, product)
        else:
            _share(product, group, places)
    return PackingReport(sum(map(len, groups)), len(groups), nbytes)


@torch.inference_mode()
def join_linears(model: nn.Module, probe: Callable[[], object]) -> None:
    """As `pack_linears`, but siblings become plain linear layers and others stay as they are."""
    places = _places(model)
    for group in _siblings(model, probe):
        if len(group) > 1:
            _share(JoinedLinear(*group), group, places)


@torch.inference_mode()
def product_linears(model: nn.Module) -> int:
    """Swap plain linear layers, those of `join_linears` too, for `GraphLinear` ones; how many."""
    swapped: dict[int, GraphLinear] = {}

    def swap(layer: nn.Linear) -> GraphLinear:
        return swapped.setdefault(id(layer), GraphLinear(layer))

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and fits(child.weight):
                setattr(parent, name, swap(child))
            elif isinstance(child, SharedLinear):
                product = child.shared.product
                if isinstance(product, JoinedLinear) and fits(product.weight):
                    child.shared.product = swap(product)
    return len(swapped)


_Places = dict[int, tuple[nn.Module, str]]


def _places(model: nn.Module) -> _Places:
    """Parent and name of each module, by its identity."""
    return {
        id(child): (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
    }


def _share(
    product: PackedLinear | JoinedLinear, group: Sequence[nn.Module], places: _Places
) -> None:
    shared = SharedInput(product)
    for index, layer in enumerate(group):
        parent, name = places[id(layer)]
        setattr(parent, name, SharedLinear(shared, index, layer))


def _siblings(model: nn.Module, probe: Callable[[], object]) -> list[list[nn.Module]]:
    """Linear layers that the probe runs, those of one parent and one input together.

    A layer that it never runs may be one whose weight is read directly; it is left alone.
    """
    calls: list[tuple[nn.Module, Tensor]] = []

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        # Holding the input keeps its identity from being given to a later tensor.
        calls.append((layer, given[0]))

    layers = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        probe()
    finally:
        for handle in handles:
            handle.remove()
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    times = Counter(id(layer) for layer, _ in calls)
    groups: dict[tuple[int, int], list[nn.Module]] = {}
    for layer, given in calls:
        if times[id(layer)] == 1:
            groups.setdefault((id(parents[id(layer)]), id(given)), []).append(layer)
    often = {id(layer): [layer] for layer, _ in calls if times[id(layer)] > 1}
    return [*groups.values(), *often.values()]


def _parts(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias of a linear layer; Conv1D keeps its weight the other way round."""
    assert isinstance(layer, nn.Linear | Conv1D)
    return (layer.weight.t() if isinstance(layer, Conv1D) else layer.weight), layer.bias


def _join(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    parts = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat(parts).contiguous()
