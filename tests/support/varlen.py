"""flash-attn's varlen function in plain operations, for machines without it.

It reads keys and values through the block table and the starts alone, so wrong arguments give wrong
results, and it refuses what the package would misread.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    """What flash-attn documents, for causal attention: queries are the last of their sequence."""
    assert causal
    assert window_size[1] == 0
    return torch.ops.flashduet_tests.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size[0],
        softcap,
        block_table,
    )


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_starts: Tensor,
    key_starts: Tensor,
    most_rows: int,
    most_keys: int,
    scale: float,
    window: int,
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    assert block_table.dtype == row_starts.dtype == key_starts.dtype == torch.int32
    assert block_table.stride(-1) == row_starts.stride(0) == key_starts.stride(0) == 1
    rows, lengths = row_starts.diff().tolist(), key_starts.diff().tolist()
    assert max(rows) <= most_rows
    assert max(lengths) <= most_keys
    assert len(rows) == len(lengths) == len(block_table)
    # Then the package takes each row for a sequence, whatever the starts say.
    assert most_rows > 1 or len(rows) == len(q)
    # Rows of no sequence are left as the memory was.
    output = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=q.dtype)
    for index, (count, length) in enumerate(zip(rows, lengths, strict=True)):
        if not count:
            continue
        own_rows = slice(int(row_starts[index]), int(row_starts[index + 1]))
        blocks = block_table[index, : -(-length // k.shape[1])].long()
        keys = k[blocks].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // k.shape[2], 1)
        values = v[blocks].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // k.shape[2], 1)
        scores = torch.einsum("qhd,khd->hqk", q[own_rows], keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(length - count, length).unsqueeze(1)
        other = torch.arange(length)
        seen = other <= own
        if window >= 0:
            seen &= other >= own - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        output[own_rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


# One operator, as the package's kernel is one: a recording holds it as a whole.
_library = torch.library.Library("flashduet_tests", "DEF")
_library.define(
    "varlen(Tensor q, Tensor k, Tensor v, Tensor row_starts, Tensor key_starts, int most_rows, "
    "int most_keys, float scale, int window, float softcap, Tensor block_table) -> Tensor"
)
_library.impl("varlen", _varlen, "CompositeExplicitAutograd")
