"""A session's context keys and values, of all layers, in buffers that grow ahead of need.

Only the engine thread touches a `ContextKV`. Rows `0..length-1` are the context. A block's keys and
values are written after them for one pass and never counted, so they cannot persist: the next
append overwrites them. Rollback is a smaller `length`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.config import DrafterConfig
from draft_service.network import KeysValues

# Growth by a quarter copies each row four times in all, and wastes a fifth at most.
_GROWTH = 1.25
_ROUNDED_TO = 128


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What one row of context takes: sizes, and where it lies."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> ContextShape:
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, dtype, device)

    @property
    def row_bytes(self) -> int:
        """Bytes of keys and values of all layers for one position."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class ContextKV:
    """Keys and values [layers, kv_heads, capacity, head_dim] of one session."""

    def __init__(self, shape: ContextShape) -> None:
        self.shape = shape
        self.length = 0
        self._keys = self._empty(0)
        self._values = self._empty(0)

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return self._keys.shape[2]

    def append(self, new: KeysValues) -> None:
        """Add rows after the context: keys and values [layers, kv_heads, rows, head_dim]."""
        end = self.length + new.keys.shape[2]
        self.reserve(end)
        self._keys[:, :, self.length : end] = new.keys
        self._values[:, :, self.length : end] = new.values
        self.length = end

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on.

        Raises:
            ValueError: there are not that many.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a context of {self.length} rows back to {length}")
        self.length = length

    def reserve(self, rows: int) -> None:
        """Make room for `rows` in all."""
        if rows <= self.capacity:
            return
        wanted = max(rows, int(self.capacity * _GROWTH))
        wanted += -wanted % _ROUNDED_TO
        self._keys, self._values = (self._grown(old, wanted) for old in (self._keys, self._values))

    def with_block(self, layer: int, start: int, k: Tensor, v: Tensor) -> KeysValues:
        """One layer's context rows from `start` on and the block's own after them.

        Args:
            k, v: [rows, kv_heads, head_dim]. Room for them must have been reserved.

        Returns:
            Views [kv_heads, length - start + rows, head_dim], good until the next call that writes.
        """
        end = self.length + k.shape[0]
        self._keys[layer, :, self.length : end] = k.transpose(0, 1)
        self._values[layer, :, self.length : end] = v.transpose(0, 1)
        return KeysValues(self._keys[layer, :, start:end], self._values[layer, :, start:end])

    def rows(self) -> KeysValues:
        """The context's rows: views [layers, kv_heads, length, head_dim]."""
        return KeysValues(self._keys[:, :, : self.length], self._values[:, :, : self.length])

    def _empty(self, rows: int) -> Tensor:
        shape = self.shape
        return torch.empty(
            (shape.num_layers, shape.num_kv_heads, rows, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )

    def _grown(self, old: Tensor, rows: int) -> Tensor:
        new = self._empty(rows)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new
