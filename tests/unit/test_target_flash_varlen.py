"""The arguments for flash-attn's varlen function describe the pass, on a machine without it."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from target_service.batching import Span
from target_service.flash_varlen import varlen_function
from target_service.memory import plan_memory
from target_service.settings import TargetSettings
from tests.support.varlen import reference_varlen
from tests.unit.target_support import TinyTarget, load_tiny, prompt


def exact_varlen(*tensors: Tensor, **arguments: Any) -> Tensor:
    """The longest sequences are told as they are."""
    for kind in ("q", "k"):
        counts = arguments[f"cu_seqlens_{kind}"].diff()
        assert int(counts.max()) == arguments[f"max_seqlen_{kind}"]
    return reference_varlen(*tensors, **arguments)


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
    tiny.engine.packed.varlen = exact_varlen
    with torch.inference_mode():
        got = tiny.engine.packed.forward(tiny.engine.kv, spans, every)
    tiny.engine.packed.varlen = None
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=0)


FLASH_ATTN = SimpleNamespace(flash_attn_varlen_func=max)


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "fields", "size"),
    [
        ("cuda", torch.bfloat16, True, {}, 256),
        ("cuda", torch.float16, True, {"cuda_graphs": False}, 256),
        ("cuda", torch.bfloat16, False, {}, 16),
        ("cuda", torch.float32, True, {}, 16),
        ("cuda", torch.bfloat16, True, {"numerics": "batch_invariant"}, 16),
        ("cpu", torch.bfloat16, True, {}, 16),
        # What was asked for is had.
        ("cuda", torch.bfloat16, True, {"block_tokens": 16}, 16),
        ("cuda", torch.bfloat16, True, {"block_tokens": 512}, 512),
        ("cpu", torch.bfloat16, False, {"block_tokens": 256}, 256),
    ],
)
def test_blocks_are_as_large_as_their_reader_wants_them(
    device: str,
    dtype: torch.dtype,
    installed: bool,
    fields: dict[str, Any],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    tiny: TinyTarget,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FLASH_ATTN if installed else None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (64 << 30, 80 << 30))
    target = replace(tiny.target, device=torch.device(device), dtype=dtype)
    plan = plan_memory(TargetSettings(**fields), target)
    assert plan.block_tokens == size
    graphs = device == "cuda" and installed and dtype.itemsize == 2 and size % 256 == 0
    assert bool(plan.graph_bytes) == (graphs and fields.get("cuda_graphs", True))


def test_it_is_for_cuda_and_for_pages_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FLASH_ATTN)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert varlen_function(cuda, 256, torch.bfloat16) is max
    assert varlen_function(cpu, 256, torch.bfloat16) is None
    assert varlen_function(cuda, 16, torch.bfloat16) is None
    assert varlen_function(cuda, 256, torch.float32) is None
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert varlen_function(cuda, 256, torch.bfloat16) is None
