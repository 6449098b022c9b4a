"""One session's keys and values, in Transformers' cache interface.

Every layer keeps the whole sequence in one growing buffer, so that dropping rejected tokens is a
change of length and copies nothing; a sliding layer hands out only the rows its window can see.
Owned by the session: written in the engine thread alone, freed with the session.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    get_layer_types_and_kwargs,
)

from flashduet.errors import CheckpointError

# First size of a buffer in tokens, and how much more than needed a grown one holds.
_FIRST_TOKENS = 128
_GROWTH = 1.5


class KeyValueLayer(CacheLayerMixin):
    """Keys and values of one attention layer.

    Args:
        max_tokens: the most tokens that will ever be held.
        window: tokens that a query sees, itself included; None means all.
    """

    is_croppable = True

    def __init__(self, max_tokens: int, window: int | None = None) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._window = window
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def is_sliding(self) -> bool:
        """Tells Transformers which layer to size the windowed mask by."""
        return self._window is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states [1, heads, n, size]; returns what the n queries may see, themselves last.

        The returned views hold `get_mask_sizes(n)[0]` rows.
        """
        first, end = self._first_visible(), self.length + key_states.shape[-2]
        self._keys = self._room(self._keys, key_states, end)
        self._values = self._room(self._values, value_states, end)
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        return self._keys[:, :, first:end], self._values[:, :, first:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that `update` will return, absolute position of the first of them)."""
        first = self._first_visible()
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self._max_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers are made by the first `update`, which knows their sizes."""

    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._keys, self._values) if part is not None)

    def _first_visible(self) -> int:
        # The next query sits at position `length` and sees `window` tokens up to itself.
        return 0 if self._window is None else max(0, self.length - self._window + 1)

    def _room(self, buffer: Tensor | None, states: Tensor, end: int) -> Tensor:
        if buffer is not None and end <= buffer.shape[-2]:
            return buffer
        if end > self._max_tokens:
            raise ValueError(f"{end} tokens of KV wanted, {self._max_tokens} reserved")
        wanted = max(end, _FIRST_TOKENS, int((0 if buffer is None else end) * _GROWTH))
        heads, size = states.shape[1], states.shape[-1]
        grown = states.new_empty(1, heads, min(wanted, self._max_tokens), size)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown


class KeyValueCache(Cache):
    """All layers of one session.

    Args:
        config: the target's text config; its layer types decide windows and layers without a cache.
        max_tokens: the most tokens that will ever be held.

    Raises:
        CheckpointError: a layer keeps a state that is not keys and values by position.
    """

    def __init__(self, config: Any, max_tokens: int) -> None:
        super().__init__(layers=[_make_layer(*kind, max_tokens) for kind in _layer_kinds(config)])

    @property
    def length(self) -> int:
        """Tokens held."""
        return max((layer.length for layer in self._attention_layers()), default=0)

    def rollback(self, length: int) -> None:
        """Forget all tokens from position `length` on; also mends a pass that broke off midway."""
        for layer in self._attention_layers():
            layer.length = min(layer.length, length)

    def nbytes(self) -> int:
        """Bytes of the buffers, room for growth included."""
        return sum(layer.nbytes() for layer in self._attention_layers())

    def _attention_layers(self) -> list[KeyValueLayer]:
        return [layer for layer in self.layers if isinstance(layer, KeyValueLayer)]


def _layer_kinds(config: Any) -> list[tuple[str, int | None]]:
    kinds, arguments = get_layer_types_and_kwargs(config)
    return [
        (kind, given.get("sliding_window")) for kind, given in zip(kinds, arguments, strict=True)
    ]


def _make_layer(kind: str, window: int | None, max_tokens: int) -> CacheLayerMixin | DummyLayer:
    if kind == "dummy":
        return DummyLayer()
    if kind == "sliding_attention":
        return KeyValueLayer(max_tokens, window)
    if kind in ("full_attention", "chunked_attention", "attention"):
        # A chunk is a matter of the mask, which is made for all rows.
        return KeyValueLayer(max_tokens)
    raise CheckpointError(f"a layer of type {kind!r} cannot be rolled back by length")
