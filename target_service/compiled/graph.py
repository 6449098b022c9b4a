"""A stock model traced as one graph over packed rows, attention left open."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from flashduet.native import load
from flashduet.packed_linear import join_linears, product_linears
from target_service.attention import PACKED, Extras, running
from target_service.features import FeatureCapture
from target_service.load import LoadedTarget
from target_service.survey import AttentionLayers, survey, vary

# Rows of the pass that is traced; the graph holds for any number from two on.
_TRACED_ROWS, _TRACED_LOGITS = 16, 8
# A graph with room for a single row could not tell it from a dimension that is always one.
LEAST_ROWS = 2


def trace(target: LoadedTarget) -> tuple[ExportedProgram, AttentionLayers]:
    """The pass (ids [1, n], positions [1, n], rows to keep [k]), all int64, as a graph.

    It gives the logits [k, V] and the outputs [1, n, hidden] of all decoder layers, the last one's
    after the final norm. Attention is `flashduet::attend`.

    Args:
        target: taken over; its model is changed and can run no other passes any more.

    Raises:
        Exception: of many kinds, where the model cannot be traced.
    """
    model: Any = target.model
    probe = vary(_TRACED_ROWS, target.config.vocab_size)

    def run() -> Any:
        return model(input_ids=probe, use_cache=False)

    with torch.no_grad():
        layers = survey(model, target.config, run)
        join_linears(model, lambda: survey(model, target.config, run))
        if load() is not None:
            product_linears(model)
        model.set_attn_implementation(PACKED)
        rows = Dim("rows", min=LEAST_ROWS)
        kept = Dim("kept", min=LEAST_ROWS)
        positions = torch.arange(_TRACED_ROWS).unsqueeze(0)
        with running(_Open(layers)):
            program = torch.export.export(
                _Pass(target),
                (probe, positions, torch.arange(_TRACED_LOGITS)),
                dynamic_shapes=({1: rows}, {1: rows}, {0: kept}),
                strict=False,
            )
    return program, layers


class _Pass(nn.Module):
    """The model's forward with tensors alone going in and coming out."""

    def __init__(self, target: LoadedTarget) -> None:
        super().__init__()
        self.model: Any = target.model
        self._depth = target.config.num_hidden_layers
        self._features = FeatureCapture(target.decoder, self._depth)
        accepted = inspect.signature(self.model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = keep
        with self._features.recording(range(self._depth)):
            logits: Tensor = self.model(**arguments).logits[0]
            states = self._features.states()
        if not self._takes_logits_to_keep:
            logits = logits.index_select(0, keep)
        return (logits, *states)


class _Open:
    """An `AttentionPass` that puts the operator into the graph."""

    def __init__(self, layers: AttentionLayers) -> None:
        self._layers = layers

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, extras: Extras, mask: Any
    ) -> Tensor:
        return torch.ops.flashduet.attend(  # type: ignore[no-any-return]
            query,
            key,
            value,
            extras.sinks,
            self._layers.index[id(layer)],
            float(extras.scaling),
            None if extras.softcap is None else float(extras.softcap),
        )
