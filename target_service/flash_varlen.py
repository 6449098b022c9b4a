"""Attention on CUDA devices by flash-attn's varlen function over the block store.

One call a layer for all sequences of the pass; keys and values are read where they lie, through a
table of blocks. Its arguments are built once a step and layer kind, and do not need the package, so
they are tested where it cannot run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashduet.kv.storage import KVStorage
from target_service.attention import Extras
from target_service.batching import Span
from target_service.settings import TargetSettings
from target_service.visibility import Visibility

# flash-attn reads pages of multiples of so many tokens.
PAGE_TOKENS = 256
# Of a block otherwise: little room is left over, and short prefixes are found again.
_SMALL_BLOCK = 16
# What to do where blocks are not read by flash-attn, for logs.
HOW_TO_HAVE_IT = (
    "install it, serve in 16 bits and leave FLASHDUET_TARGET_BLOCK_TOKENS at 0 or set a multiple "
    f"of {PAGE_TOKENS}"
)

VarlenFunction = Callable[..., Tensor]


def varlen_function(
    device: torch.device, block_tokens: int, dtype: torch.dtype
) -> VarlenFunction | None:
    """flash-attn's function, where it is installed and can read blocks of this size and type."""
    if device.type != "cuda" or block_tokens % PAGE_TOKENS or dtype.itemsize != 2:
        return None
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func  # type: ignore[no-any-return]
    except ImportError:
        return None


def block_size(settings: TargetSettings, device: torch.device, dtype: torch.dtype) -> int:
    """Tokens of a block: what was set, or what attention on this device reads best."""
    if settings.block_tokens:
        return settings.block_tokens
    # Batch-invariant passes attend in their own way.
    paged = settings.numerics == "fast" and varlen_function(device, PAGE_TOKENS, dtype) is not None
    return PAGE_TOKENS if paged else _SMALL_BLOCK


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """What one call needs besides queries, keys and values.

    Attributes:
        row_starts: [s + 1], int32: each sequence's first packed row, and the number of rows.
        key_starts: [s + 1], int32: sums of the sequences' lengths.
        longest_rows, longest_keys: of one sequence.
        block_table: [s, blocks], int32, filled up with zeros.
        window: positions before a query's own that it sees, -1 for all; none after it.
    """

    row_starts: Tensor
    key_starts: Tensor
    longest_rows: int
    longest_keys: int
    block_table: Tensor
    window: tuple[int, int]


def can_plan(rule: Visibility, extras: Extras) -> bool:
    """Whether the function computes this: windows and softcap, but no chunks and no sinks."""
    return rule.chunk is None and extras.sinks is None


def plan(spans: Sequence[Span], rule: Visibility, kv: KVStorage) -> VarlenPlan:
    """Arguments for the spans of one pass, in the order of their rows."""
    rows = [len(span.token_ids) for span in spans]
    lengths = [span.end for span in spans]
    counts = [-(-length // kv.block_tokens) for length in lengths]
    table = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    for index, (span, count) in enumerate(zip(spans, counts, strict=True)):
        table[index, :count] = torch.tensor(list(span.block_ids[:count]), dtype=torch.int32)
    return VarlenPlan(
        _starts(rows).to(kv.device),
        _starts(lengths).to(kv.device),
        max(rows),
        max(lengths),
        table.to(kv.device),
        (-1 if rule.window is None else rule.window - 1, 0),
    )


def attend_varlen(
    function: VarlenFunction,
    planned: VarlenPlan,
    query: Tensor,
    kv: KVStorage,
    layer: int,
    extras: Extras,
) -> Tensor:
    """Queries [heads, n, size] to [n, heads, value_size]."""
    return function(
        query.transpose(0, 1),
        _pages(kv.keys[layer], kv.block_tokens),
        _pages(kv.values[layer], kv.block_tokens),
        cu_seqlens_q=planned.row_starts,
        cu_seqlens_k=planned.key_starts,
        max_seqlen_q=planned.longest_rows,
        max_seqlen_k=planned.longest_keys,
        softmax_scale=extras.scaling,
        causal=True,
        window_size=planned.window,
        softcap=extras.softcap or 0.0,
        block_table=planned.block_table,
    )


def _pages(table: Tensor, block_tokens: int) -> Tensor:
    """[heads, slots, size] seen as [blocks, block_tokens, heads, size]."""
    return table.unflatten(1, (-1, block_tokens)).permute(1, 2, 0, 3)


def _starts(counts: Sequence[int]) -> Tensor:
    sums = torch.zeros(len(counts) + 1, dtype=torch.int32)
    sums[1:] = torch.tensor(counts).cumsum(0)
    return sums
