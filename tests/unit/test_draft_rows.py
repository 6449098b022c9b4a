"""A serving network with machine code for its rows computes what it computes without."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_service import layers, native_rows
from draft_service import network as networks
from draft_service.checkpoint import load_drafter
from draft_service.native_rows import RowKernels, kernels_for, row_kernels
from draft_service.network import DFlashNetwork
from flashduet.models_cache import CACHE_VARIABLE
from flashduet.native import building
from flashduet.native.building import LibrarySource
from target_service.compiled.package import compiler

needs_library = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def library() -> None:
    """Where there is a compiler there is a library: it was not found wrong."""
    assert compiler() is None or row_kernels() is not None


def fused(original: DFlashNetwork, kernels: RowKernels | None) -> DFlashNetwork:
    """The same weights for serving in bfloat16, norms away from 1, with these kernels or none."""
    config = replace(original.config, rotary_scale=1.25)
    network = DFlashNetwork(config)
    network.load_state_dict(original.state_dict())
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.data = 1 + torch.randn(parameter.shape, generator=generator) / 4
    network.to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        for module in (layers, networks):
            patch.setattr(module, "kernels_for", lambda weight: kernels)
        network.fuse()
    return network


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(
        one.float(), other.float(), rtol=0.03, atol=0.03 * float(other.abs().max())
    )


@needs_library
@pytest.mark.parametrize("lead", [(1,), (7,), (2, 5)])
@pytest.mark.parametrize("first", [0, 300, 1_000_003])
@torch.inference_mode()
def test_the_network_is_the_same_with_them_and_without(tiny_models, lead, first):
    original = load_drafter(tiny_models / "drafter")
    own, plain = fused(original, row_kernels()), fused(original, None)
    config = original.config
    generator = torch.Generator().manual_seed(2)
    positions = torch.arange(first, first + lead[-1]).expand(lead)
    features = torch.randn(*lead, config.feature_width, generator=generator).bfloat16()
    states = plain.context_states(features)
    close(own.context_states(features), states)
    for one, other in zip(
        own.context_rows(states, positions), plain.context_rows(states, positions), strict=True
    ):
        assert one.shape == other.shape
        close(one, other)

    seen: dict[str, list[torch.Tensor]] = {"own": [], "plain": []}
    block = torch.randn(*lead, config.hidden_size, generator=generator).bfloat16()
    hidden = {}
    for name, network in (("own", own), ("plain", plain)):

        def attend(index, q, k, v, name=name):
            seen[name] += [q, k, v]
            return q.flatten(-2)

        hidden[name] = network.run(block, positions, attend)
    for one, other in zip(seen["own"][:3], seen["plain"][:3], strict=True):
        assert one.shape == other.shape
        close(one, other)
    close(hidden["own"], hidden["plain"])


@needs_library
@torch.inference_mode()
def test_positions_that_several_rows_share_are_broadcast(tiny_models):
    own = fused(load_drafter(tiny_models / "drafter"), row_kernels())
    states = torch.randn(3, 4, own.config.hidden_size).bfloat16()
    shared = own.context_rows(states, torch.arange(9, 13))
    alone = own.context_rows(states, torch.arange(9, 13).expand(3, 4))
    assert torch.equal(shared.keys, alone.keys)


@needs_library
def test_a_row_does_not_depend_on_the_others():
    kernels = row_kernels()
    assert kernels is not None
    x, weight = torch.randn(9, 70).bfloat16(), torch.randn(70).bfloat16()
    whole = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(kernels.rms_norm(x[4:5], weight, 1e-6), whole[4:5])
    assert torch.equal(kernels.rms_norm(x.t().contiguous().t()[2:6], weight, 1e-6), whole[2:6])
    assert kernels.rms_norm(x[:0], weight, 1e-6).shape == (0, 70)
    x[3, 8] = torch.nan
    bad = kernels.rms_norm(x, weight, 1e-6)
    assert bad[3].isnan().all()
    assert torch.equal(bad[4:], whole[4:])


def test_other_types_have_none():
    assert kernels_for(torch.zeros(4)) is None
    assert (kernels_for(torch.zeros(4).bfloat16()) is None) == (compiler() is None)


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    row_kernels.cache_clear()
    yield tmp_path
    row_kernels.cache_clear()


def test_without_a_compiler_there_are_none(nothing_built, monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert kernels_for(torch.zeros(4).bfloat16()) is None


@needs_library
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("a * widened(cos[i]) - b", "a * widened(cos[i]) + b"),
        ("+ epsilon", "+ 1"),
        ("cos(", "sin("),
    ],
)
def test_wrong_machine_code_is_not_used(nothing_built, monkeypatch, right, wrong):
    source = native_rows._SOURCE
    changed = nothing_built / "rows.cpp"
    shutil.copy(source.files[-1], changed)
    text = changed.read_text()
    assert right in text
    changed.write_text(text.replace(right, wrong))
    monkeypatch.setattr(native_rows, "_SOURCE", LibrarySource("row", [changed], source.flags))
    assert row_kernels() is None
