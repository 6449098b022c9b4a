"""Context features: the hidden states that a drafter is conditioned on.

Hooks exist only for layers that some session's drafter asks for, and keep a state only during a
pass whose session wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flashduet.errors import CheckpointError, Incompatible


class FeatureCapture:
    """Reads the outputs of chosen decoder layers of one model. Used in the engine thread alone.

    Layer id i means the output of decoder layer i, Transformers' `hidden_states[i + 1]`. For the
    last layer that entry is the state after the final norm, which no hook on the layer sees: it is
    the decoder's own output.

    Args:
        decoder: the model with or without its head.
        num_layers: its decoder layers.
    """

    def __init__(self, decoder: nn.Module, num_layers: int) -> None:
        self._decoder: nn.Module | None
        self._decoder, self._layers = _decoder_layers(decoder, num_layers)
        self._depth = num_layers
        self._handles: dict[int, RemovableHandle] = {}
        self._wanted: frozenset[int] = frozenset()
        self._states: dict[int, Tensor] = {}

    @property
    def hooked_layer_ids(self) -> frozenset[int]:
        return frozenset(self._handles)

    @property
    def wanted(self) -> frozenset[int]:
        """Layers whose states the current block keeps."""
        return self._wanted

    def check(self, layer_ids: Sequence[int]) -> None:
        """Raises Incompatible where an id is not one of the target's layers."""
        depth = self._depth
        if not layer_ids or any(not 0 <= layer_id < depth for layer_id in layer_ids):
            raise Incompatible(
                f"target_layer_ids {list(layer_ids)}: ids from 0 to {depth - 1} expected; "
                "the drafter was trained for another target"
            )

    @contextmanager
    def recording(self, layer_ids: Collection[int]) -> Iterator[None]:
        """Keep the states of these layers from the pass made inside the block.

        A block inside another one keeps its own until it ends, and leaves none behind.
        """
        before, self._wanted = self._wanted, frozenset(layer_ids)
        if self._decoder is not None:
            for layer_id in self._wanted - self._handles.keys():
                self._handles[layer_id] = self._hook(layer_id)
        try:
            yield
        finally:
            self._wanted = before
            self._states.clear()

    def take(self, states: Sequence[Tensor] | Mapping[int, Tensor]) -> None:
        """The outputs [1, n, hidden] by layer id, from a pass that no hook sees."""
        for layer_id in self._wanted:
            self._states[layer_id] = states[layer_id]

    def states(self) -> list[Tensor]:
        """What the pass gave for the layers recorded, in order of their ids."""
        return [self._states[layer_id] for layer_id in sorted(self._states)]

    def rows(self, layer_ids: Sequence[int], first: int, count: int) -> Tensor:
        """`count` rows of the pass from `first` on: [count, len(layer_ids) * hidden], a copy.

        Layers are concatenated in the order given. Call it inside `recording`.
        """
        return torch.cat(
            [self._states[layer_id][0, first : first + count] for layer_id in layer_ids], dim=-1
        )

    def let_go(self) -> None:
        """Take the hooks off and let the model go: states come by `take` alone from now on."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._decoder, self._layers = None, nn.ModuleList()

    def _hook(self, layer_id: int) -> RemovableHandle:
        assert self._decoder is not None
        last = layer_id == self._depth - 1
        module = self._decoder if last else self._layers[layer_id]
        return module.register_forward_hook(self._keeper(layer_id))

    def _keeper(self, layer_id: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            if layer_id in self._wanted:
                # A layer gives a tensor or a tuple, the decoder an output whose first entry is the
                # last hidden state.
                self._states[layer_id] = output if isinstance(output, Tensor) else output[0]

        return keep


def _decoder_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The list of decoder layers, and the module that runs it, e.g. `LlamaModel`."""
    for owner in model.modules():
        for module in owner.children():
            if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                return owner, module
    raise CheckpointError(
        f"{type(model).__name__}: no list of {num_layers} decoder layers found in the model"
    )
