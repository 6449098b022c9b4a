"""Masks and network: one pass over many blocks, fused or not, is what the rounds compute."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_service.checkpoint import load_drafter
from draft_service.config import DrafterConfig
from draft_service.masks import LayerMask, attention_mask, attention_masks, visible
from draft_service.network import DFlashNetwork

KINDS = [
    LayerMask(),
    LayerMask(is_causal=True),
    LayerMask(is_causal=True, window=4),
    LayerMask(window=4),
]
BLOCK = 6


@pytest.fixture(scope="module")
def network(tiny_models: Path) -> DFlashNetwork:
    return load_drafter(tiny_models / "drafter")


def with_masks(network: DFlashNetwork, *kinds: LayerMask) -> DFlashNetwork:
    """The same weights under other masks."""
    other = DFlashNetwork(replace(network.config, layer_masks=kinds))
    other.load_state_dict(network.state_dict())
    return other.requires_grad_(False)


def one_block(
    network: DFlashNetwork, features: torch.Tensor, block: torch.Tensor, anchor: int
) -> torch.Tensor:
    """A round's pass: features [1, anchor, n·H], block [1, q, H] → [1, q, H]."""
    context_positions = torch.arange(anchor)[None]
    positions = torch.arange(anchor, anchor + block.shape[1])[None]
    context = network.context_kv(network.context_states(features), context_positions)
    masks = attention_masks(network.config.layer_masks, positions, context_positions)
    return network(block, positions, context, masks)


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids=str)
def test_a_packed_training_pass_equals_the_rounds_one_by_one(
    network: DFlashNetwork, kinds: tuple[LayerMask, ...]
) -> None:
    network = with_masks(network, *kinds)
    generator = torch.Generator().manual_seed(3)
    width, hidden = network.config.feature_width, network.config.hidden_size
    features = torch.randn(1, 30, width, generator=generator)
    anchors = [3, 9, 11, 25]  # overlapping blocks, one starting before a window is full
    blocks = torch.randn(1, len(anchors), BLOCK, hidden, generator=generator)

    positions = torch.cat([torch.arange(a, a + BLOCK) for a in anchors])[None]
    of_block = torch.tensor(anchors).repeat_interleave(BLOCK)[None]
    padded = torch.cat([features, torch.randn(1, 2, width, generator=generator)], dim=1)
    context_positions = torch.cat([torch.arange(30), torch.tensor([1 << 30] * 2)])[None]
    masks = attention_masks(kinds, positions, context_positions, anchors=of_block)
    context = network.context_kv(network.context_states(padded), context_positions)
    packed = network(blocks.flatten(1, 2), positions, context, masks)
    packed = packed.unflatten(1, (len(anchors), BLOCK))
    for i, anchor in enumerate(anchors):
        alone = one_block(network, features[:, :anchor], blocks[:, i], anchor)
        assert (packed[:, i] - alone).abs().max() < 1e-5


def test_visibility_is_the_definition() -> None:
    for kind in KINDS:
        seen = visible(kind, torch.arange(12), torch.arange(12))
        for q, k in itertools.product(range(12), range(12)):
            expected = not (kind.is_causal and k > q)
            if kind.window is not None:
                expected = expected and abs(q - k) < kind.window
            assert seen[q, k] == expected


def test_no_mask_is_made_where_everything_is_seen() -> None:
    positions, context = torch.arange(8, 12)[None], torch.arange(8)[None]
    assert attention_mask(LayerMask(), positions, context) is None
    anchored = attention_mask(LayerMask(), positions, context, anchors=torch.full((1, 4), 8))
    assert anchored is not None
    assert anchored.all()


def test_a_block_sees_nothing_at_or_after_its_anchor(network: DFlashNetwork) -> None:
    """Features at the anchor would be the answer itself: seeing them ruins a trained drafter."""
    context_positions = torch.arange(10)[None]
    positions = torch.arange(4, 4 + BLOCK)[None]
    anchors = torch.full((1, BLOCK), 4)
    mask = attention_mask(LayerMask(), positions, context_positions, anchors)
    assert mask is not None
    assert mask[0, :, :4].all()
    assert not mask[0, :, 4:10].any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_fusing_changes_no_results(tiny_models: Path, bias: bool, pack: bool) -> None:
    config = replace(DrafterConfig.load(tiny_models / "drafter"), attention_bias=bias)
    torch.manual_seed(0)
    network = DFlashNetwork(config)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 12, config.feature_width, generator=generator)
    block = torch.randn(1, BLOCK, config.hidden_size, generator=generator)
    before, names = one_block(network, features, block, 12), set(network.state_dict())
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    network.fuse(pack)
    assert (one_block(network, features, block, 12) - before).abs().max() < 1e-5
    # Packed weights are in the processor's layout, and no checkpoint's any more.
    assert pack or set(network.state_dict()) == names
    for name, value in network.state_dict().items():
        assert torch.equal(value, weights[name])


def test_every_parameter_gets_a_gradient(tiny_models: Path) -> None:
    network = DFlashNetwork(DrafterConfig.load(tiny_models / "drafter"))
    features = torch.randn(1, 12, network.config.feature_width)
    block = torch.randn(1, BLOCK, network.config.hidden_size)
    network.logits(
        one_block(network, features, block, 12), torch.randn(50, 64)
    ).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_positions_far_past_every_table_are_exact(network: DFlashNetwork) -> None:
    """Rotary attention depends on distances only, however far out the sequence is."""
    full = with_masks(network, LayerMask(), LayerMask())
    features = torch.randn(1, 12, full.config.feature_width)
    block = torch.randn(1, BLOCK, full.config.hidden_size)
    results = []
    for offset in (0, 100_000):
        context_positions = torch.arange(12)[None] + offset
        positions = torch.arange(12, 12 + BLOCK)[None] + offset
        context = full.context_kv(full.context_states(features), context_positions)
        masks = attention_masks(full.config.layer_masks, positions, context_positions)
        results.append(full(block, positions, context, masks))
    assert (results[0] - results[1]).abs().max() < 0.05  # float32 angles at 1e5 are good to 1e-2


def test_half_precision_weights_keep_exact_frequencies(tiny_models: Path) -> None:
    network = load_drafter(tiny_models / "drafter", dtype=torch.bfloat16).to(torch.bfloat16)
    assert network.fc.weight.dtype == torch.bfloat16
    assert network.rotary.frequencies.dtype == torch.float32
    assert network.rotary.frequencies.tolist() == list(network.config.inverse_frequencies)
