"""The arguments for flash-attn's varlen function describe the pass, on a machine without it.

A plain function of the same signature stands for the package's: it reads keys and values through
the block table and the starts alone, so wrong arguments give wrong logits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from target_service.batching import Span
from target_service.flash_varlen import varlen_function
from tests.unit.target_support import TinyTarget, load_tiny, prompt


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
    assert block_table.dtype == cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    rows, lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(rows), max(lengths)) == (max_seqlen_q, max_seqlen_k)
    outputs = []
    for index, (count, length) in enumerate(zip(rows, lengths, strict=True)):
        start = int(cu_seqlens_q[index])
        blocks = block_table[index, : -(-length // k.shape[1])].long()
        keys = k[blocks].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // k.shape[2], 1)
        values = v[blocks].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // k.shape[2], 1)
        scores = torch.einsum("qhd,khd->hqk", q[start : start + count], keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(length - count, length).unsqueeze(1)
        other = torch.arange(length)
        seen = other <= own
        if window_size[0] >= 0:
            seen &= other >= own - window_size[0]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gpt_oss"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    """Windows, softcap, and sinks, which the function has not and which go the other way."""
    return load_tiny(tmp_path_factory.mktemp(request.param), request.param)


def test_a_mixed_pass_by_the_varlen_function(tiny: TinyTarget) -> None:
    lengths = [(0, 40), (37, 1), (90, 5), (33, 8)]
    spans, expected = [], []
    for index, (base, rows) in enumerate(lengths):
        tokens = prompt(base + rows, seed=index)
        session = tiny.session(tokens, scattered=index % 2 == 1)
        if base:
            tiny.logits(session, 0, tokens[:base])
        spans.append(Span(session.table.block_ids, base, tokens[base:]))
        expected.append(tiny.reference(tokens).logits[0, base:])
    every = torch.arange(sum(rows for _, rows in lengths))
    tiny.engine.packed.varlen = reference_varlen
    with torch.inference_mode():
        got = tiny.engine.packed.forward(tiny.engine.kv, spans, every)
    tiny.engine.packed.varlen = None
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=0)


def test_it_is_for_cuda_and_for_pages_of_its_size(tmp_path: Path) -> None:
    assert varlen_function(torch.device("cpu"), 256) is None
    assert varlen_function(torch.device("cuda"), 16) is None
