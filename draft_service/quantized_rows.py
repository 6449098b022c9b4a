"""Context rows as 8-bit integers: a little over half the memory of 16-bit rows.

Each head's key (or value) of each position has its own scale, so that one loud position does not
cost the others their precision: x ≈ q · s with s = max|x| / 127. Rows become numbers of the
network's type again when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashduet.kv.storage import KVStorage, LayerShape, Slots

_LARGEST = 127.0
SCALE_BYTES = torch.float32.itemsize


class QuantizedStorage:
    """The interface of `KVStorage`, over tables of int8 numbers and float32 scales.

    Args:
        dtype: of what is written and read.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._numbers = KVStorage(layers, num_blocks, block_tokens, torch.int8, device)
        scales = [LayerShape(shape.kv_heads, 1, 1) for shape in layers]
        self._scales = KVStorage(scales, num_blocks, block_tokens, torch.float32, device)
        self._dtype = dtype
        self.num_blocks = num_blocks
        self.device = self._numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, used or not."""
        return self._numbers.nbytes + self._scales.nbytes

    def locate(self, block_ids: Sequence[int], start: int, end: int) -> Slots:
        """As `KVStorage.locate`."""
        return self._numbers.locate(block_ids, start, end)

    def write(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Round keys and values [n, kv_heads, size] to n slots."""
        (keys, key_scales), (values, value_scales) = _rounded(keys), _rounded(values)
        self._numbers.write(layer, slots, keys, values)
        self._scales.write(layer, slots, key_scales, value_scales)

    def fetch(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, n, size] at n slots, in the network's type."""
        numbers, scales = self._numbers.fetch(layer, slots), self._scales.fetch(layer, slots)
        keys, values = (
            (number.float() * scale).to(self._dtype)
            for number, scale in zip(numbers, scales, strict=True)
        )
        return keys, values


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """[n, heads, size] → int8 of the same shape, and float32 scales [n, heads, 1]."""
    x = x.float()
    # A row of zeros has any scale; the least normal number divides without making NaN.
    scale = (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    # NaN and infinity have no integer: a broken row keeps a broken scale, so that it reads as NaN.
    return (x / scale).round().nan_to_num().clamp(-_LARGEST, _LARGEST).to(torch.int8), scale
