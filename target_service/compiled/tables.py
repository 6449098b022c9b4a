"""What a native pass is told: once the store's tables, and of each pass whose rows are where."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashduet.kv.storage import KVStorage
from target_service.batching import Span
from target_service.survey import AttentionLayers


def native_store(kv: KVStorage, layers: AttentionLayers) -> Any:
    """The store's tables and the layers' rules, as the library's passes know them."""
    windows = [rule.window or 0 for rule in layers.rules]
    chunks = [rule.chunk or 0 for rule in layers.rules]
    return torch.classes.flashduet.Store(kv.keys, kv.values, windows, chunks, kv.block_tokens)


def plan(spans: Sequence[Span], block_tokens: int) -> Tensor:
    """Int64 numbers, of each span its rows, base, number of blocks and the blocks' ids."""
    numbers = array("q")
    for span in spans:
        held = span.block_ids[: -(-span.end // block_tokens)]
        numbers.extend((len(span.token_ids), span.base, len(held)))
        numbers.extend(held)
    return torch.frombuffer(numbers, dtype=torch.int64)
