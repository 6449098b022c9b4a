"""What attention layers a model has, found by running it once before it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashduet.errors import CheckpointError
from flashduet.kv.storage import LayerShape
from target_service.attention import SURVEY, Extras, MaskRequest, running
from target_service.visibility import Visibility, recognize


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """The attention layers of one model, in the order in which a pass runs them.

    Attributes:
        index: place of a layer by the identity of its module.
        shapes: what a token's keys and values take in each.
        rules: what each layer's queries see.
    """

    index: dict[int, int]
    shapes: tuple[LayerShape, ...]
    rules: tuple[Visibility, ...]


def survey(model: Any, config: Any, forward: Callable[[], object]) -> AttentionLayers:
    """Run `forward` once with attention layers that only say what they are.

    Args:
        model: a Transformers model; its attention implementation is left to be set by the caller.
        config: the decoder's own, for its window and chunk sizes.
        forward: one pass over a few tokens without a cache.

    Raises:
        CheckpointError: the model cannot be served; names its type and the reason.
    """
    kind = f"model_type {config.model_type!r}"
    try:
        model.set_attn_implementation(SURVEY)
    except (ValueError, ImportError) as error:
        raise CheckpointError(f"{kind}: {error}") from error
    found = _Survey(_sizes(config))
    try:
        with running(found):
            forward()
    except CheckpointError as error:
        raise CheckpointError(f"{kind}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{kind}: a pass failed: {error}") from error
    depth = config.num_hidden_layers
    if len(found.shapes) != depth:
        raise CheckpointError(
            f"{kind}: {len(found.shapes)} of {depth} layers use Transformers' attention interface; "
            "only models whose every layer does can be served"
        )
    return AttentionLayers(found.index, tuple(found.shapes), tuple(found.rules))


def _sizes(config: Any) -> list[int]:
    """Windows and chunks that a config names."""
    names = ("sliding_window", "attention_chunk_size", "window_size", "local_window")
    given = [getattr(config, name, None) for name in names]
    return [size for size in given if isinstance(size, int) and size > 0]


@dataclass
class _Survey:
    """Notes each layer's call; the attention itself is replaced by the values' own mean."""

    sizes: list[int]
    index: dict[int, int] = field(default_factory=dict)
    shapes: list[LayerShape] = field(default_factory=list)
    rules: list[Visibility] = field(default_factory=list)

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, extras: Extras, mask: Any
    ) -> Tensor:
        if id(layer) in self.index:
            raise CheckpointError(f"{type(layer).__name__} attends more than once a pass")
        self.index[id(layer)] = len(self.index)
        self.shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
        self.rules.append(self._rule(layer, mask))
        heads, rows = query.shape[1], query.shape[2]
        return value.mean(dim=1).unsqueeze(2).expand(-1, rows, heads, -1).contiguous()

    def _rule(self, layer: nn.Module, mask: Any) -> Visibility:
        if not isinstance(mask, MaskRequest):
            raise CheckpointError(
                f"{type(layer).__name__} makes its masks without Transformers' mask interface"
            )
        rule = recognize(mask.function, self.sizes)
        if rule is None:
            raise CheckpointError(
                f"{type(layer).__name__} is neither causal nor causal with a window or chunks"
            )
        return rule


def vary(count: int, vocab_size: int) -> Tensor:
    """Token ids [1, count] that differ from their neighbours."""
    return torch.tensor([[index * 7919 % vocab_size for index in range(count)]])
