"""The network against the official `dflash` package, over rounds with partial acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import (
    DFlashDraftModel,
    _crop_to,
    _make_cache,
    _raw_input_embeddings,
    build_target_layer_ids,
)
from transformers import AutoModelForCausalLM, DynamicCache

from draft_service.config import DrafterConfig, default_target_layer_ids
from tests.support.tiny import MASK, tiny_drafter, tiny_target
from tests.unit.drafting import engine_of, features_for

LIMIT = 1e-4
PROMPT = 21
# Rows committed in each round: nothing accepted, some, all, and past every window below.
COMMITTED = [1, 4, 8, 1, 3, 6]

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"layers": 1},
    "head_dim absent": {"head_dim": 128, "drop": ["head_dim"]},
    "one group": {"num_key_value_heads": 4},
    "attention_bias": {"attention_bias": True},
    "block_size nested": {"drop": ["block_size"], "dflash": {"block_size": 8}},
    "block_size absent": {"drop": ["block_size"]},
    "target_layer_ids absent": {
        "layers": 3,
        "dflash": {"target_layer_ids": [1, 1, 1]},
        "drop_nested": ["target_layer_ids"],
    },
    "target_layer_ids at the top": {
        "target_layer_ids": [0, 2, 2],
        "drop_nested": ["target_layer_ids"],
    },
    "mask_token_id at the top": {"mask_token_id": 9, "drop_nested": ["mask_token_id"]},
    "last layer tapped": {"dflash": {"target_layer_ids": [0, 1, 3]}},
    "causal": {"is_causal": True},
    "sliding": {
        "layers": 3,
        "layer_types": SLIDING,
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "sliding, not causal": {
        "layers": 3,
        "layer_types": SLIDING,
        "use_sliding_window": True,
        "sliding_window": 5,
        "is_causal": False,
    },
    "sliding, all causal": {
        "layers": 3,
        "layer_types": SLIDING,
        "use_sliding_window": True,
        "sliding_window": 9,
        "is_causal": True,
    },
    "window switched off": {"layers": 3, "layer_types": SLIDING, "sliding_window": 9},
    "window of every layer": {
        "layers": 3,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
    },
    "yarn": {"rope_parameters": YARN},
    "yarn as rope_scaling": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
    "input_embedding_scale": {"dflash": {"input_embedding_scale": 3.5}},
    "output_multiplier": {"dflash": {"output_multiplier": 0.25}},
    "final_logit_softcapping": {"dflash": {"final_logit_softcapping": 5.0}},
    "scales at the top": {
        "input_embedding_scale": 0.5,
        "output_multiplier": 2.0,
        "final_logit_softcapping": 10.0,
    },
    "nested wins": {
        "output_multiplier": 9.0,
        "final_logit_softcapping": 1.0,
        "dflash": {"output_multiplier": 2.0, "final_logit_softcapping": 20.0},
    },
    "eps and act": {"rms_norm_eps": 1e-3, "hidden_act": "gelu"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("oracle") / "target", "llama")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_official_ones(name: str, target: Path, tmp_path: Path) -> None:
    folder = write_variant(tmp_path / "drafter", target, dict(VARIANTS[name]))
    official = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    whole_target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    engine = engine_of(folder, target)
    assert tuple(official.target_layer_ids) == engine.config.target_layer_ids
    assert official.block_size == engine.config.block_length
    assert official.mask_token_id == engine.config.mask_token_id

    context, cache = engine.new_context(), official_cache(official)
    start, rows = 0, PROMPT
    for round, committed in enumerate(COMMITTED):
        new = features_for(engine, rows, seed=round)
        engine.ingest(context, start, new)
        start += rows
        anchor, block_length = (7 * round + 11) % 300, 8 - round % 3
        ours = engine.draft_logits([engine.proposal(context, start, anchor, block_length)])
        theirs = official_logits(official, whole_target, cache, new, start, anchor, block_length)
        assert (ours - theirs).abs().max() < LIMIT
        assert context.engine.length == start
        rows = committed


def official_cache(official: DFlashDraftModel) -> Any:
    windowless = official.config.sliding_window is None
    if windowless and "sliding_attention" in official.config.layer_types:
        return DynamicCache()  # made from such a config it raises: a window of None
    return _make_cache(official.config)


@torch.inference_mode()
def official_logits(
    official: DFlashDraftModel,
    target: torch.nn.Module,
    cache: Any,
    new_features: torch.Tensor,
    start: int,
    anchor: int,
    block_length: int,
) -> torch.Tensor:
    """What the official loop computes in a round whose context ends at `start`."""
    block = torch.full((1, block_length), official.mask_token_id)
    block[0, 0] = anchor
    nested = getattr(official.config, "dflash_config", {})
    scale = nested.get(
        "input_embedding_scale", getattr(official.config, "input_embedding_scale", 1.0)
    )
    hidden = official(
        target_hidden=new_features[None],
        noise_embedding=_raw_input_embeddings(target, block, float(scale)),
        position_ids=torch.arange(start - len(new_features), start + block_length)[None],
        past_key_values=cache,
        use_cache=True,
    )[:, 1 - block_length :, :]
    _crop_to(cache, start)
    return official.compute_logits(hidden, target.lm_head)[0]


def write_variant(folder: Path, target: Path, variant: dict[str, Any]) -> Path:
    """A random checkpoint whose config has or lacks the variant's keys."""
    import json

    from safetensors.torch import load_file, save_file

    drop, drop_nested = variant.pop("drop", []), variant.pop("drop_nested", [])
    tiny_drafter(folder, target, **variant)
    config = json.loads((folder / "config.json").read_text())
    for key in drop:
        config.pop(key)
    for key in drop_nested:
        config["dflash_config"].pop(key)
    if "rope_parameters" in config:
        config.pop("rope_theta")
    (folder / "config.json").write_text(json.dumps(config))
    if config.get("attention_bias"):
        tensors = load_file(folder / "model.safetensors")
        for name in [n for n in tensors if n.endswith("_proj.weight") and "self_attn" in n]:
            bias = name.removesuffix("weight") + "bias"
            tensors[bias] = torch.randn(tensors[name].shape[0])
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_default_target_layer_ids_are_the_official_ones() -> None:
    for depth in range(5, 90):
        for layers in range(1, 9):
            ours = default_target_layer_ids(depth, layers)
            assert list(ours) == build_target_layer_ids(depth, layers)


def test_the_oracle_can_fail(target: Path, tmp_path: Path) -> None:
    """A context row that differs is seen in the logits: the agreement above is not vacuous."""
    engine = engine_of(tiny_drafter(tmp_path / "drafter", target), target)
    first, second = engine.new_context(), engine.new_context()
    features = features_for(engine, PROMPT)
    other = features.clone()
    other[3, :8] += 1.0
    engine.ingest(first, 0, features)
    engine.ingest(second, 0, other)
    logits = [engine.draft_logits([engine.proposal(c, PROMPT)]) for c in (first, second)]
    assert (logits[0] - logits[1]).abs().max() > 100 * LIMIT


def test_head_dim_written_out_by_us_is_read_back(target: Path, tmp_path: Path) -> None:
    config = DrafterConfig.load(tiny_drafter(tmp_path / "drafter", target))
    assert (config.head_dim, config.mask_token_id, config.block_length) == (16, MASK, 8)
