"""Checkpoints that are damaged or of another kind: what the error names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.checkpoint import load_drafter
from draft_service.config import DrafterConfig
from draft_service.draft_vocabulary import DraftVocabulary
from draft_service.pairing import check_drafter
from draft_service.target_tensors import TargetTensors, load_target_tensors
from flashduet.errors import CheckpointError, Incompatible
from flashduet.v1.common_pb2 import ModelFacts
from tests.support.tiny import tiny_drafter, tiny_target

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("checkpoint") / "target", "llama")


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    return tiny_drafter(tmp_path / "drafter", target)


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys; None removes one."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path) -> dict[str, str]:
    """Split the weights into two files with an index; returns which tensor is where."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    file_of = {}
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        file_of |= dict.fromkeys(chosen, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return file_of


def failure(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder)
    return str(caught.value)


def test_weights_are_read_unchanged_also_from_shards(drafter: Path) -> None:
    stored = load_file(drafter / WEIGHTS)
    assert len(stored) == 11 * 2 + 3
    whole = load_drafter(drafter).state_dict()
    shard(drafter)
    sharded = load_drafter(drafter).state_dict()
    for name, value in stored.items():
        assert torch.equal(whole[name], value)
        assert torch.equal(sharded[name], value)


def test_dtype_is_as_stored_or_as_asked_for(drafter: Path) -> None:
    change_tensors(drafter, lambda t: t.update({n: v.half() for n, v in t.items()}))
    assert load_drafter(drafter).fc.weight.dtype == torch.float16
    assert load_drafter(drafter, dtype=torch.float32).fc.weight.dtype == torch.float32


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.99])
def test_truncated_file(drafter: Path, kept: float) -> None:
    data = (drafter / WEIGHTS).read_bytes()
    size = int(len(data) * kept) if isinstance(kept, float) else kept
    (drafter / WEIGHTS).write_bytes(data[:size])
    message = failure(drafter)
    assert f"drafter/{WEIGHTS}" in message
    assert f"{size} bytes" in message
    assert "truncated" in message


def test_missing_tensor(drafter: Path) -> None:
    change_tensors(drafter, lambda t: t.pop("layers.1.self_attn.k_norm.weight"))
    message = failure(drafter)
    assert "layers.1.self_attn.k_norm.weight: expected this tensor, found none" in message
    assert WEIGHTS in message


def test_wrong_shape(drafter: Path) -> None:
    change_tensors(drafter, lambda t: t.update({"fc.weight": torch.zeros(64, 100)}))
    assert "fc.weight: expected shape [64, 192], found [64, 100]" in failure(drafter)


def test_wrong_element_type(drafter: Path) -> None:
    change_tensors(drafter, lambda t: t.update({"norm.weight": torch.zeros(64, dtype=torch.int8)}))
    assert "norm.weight: expected a floating-point tensor, found torch.int8" in failure(drafter)


def test_tensors_of_another_architecture(drafter: Path) -> None:
    change_tensors(drafter, lambda t: t.update({"markov_head.weight": torch.zeros(64)}))
    assert "markov_head.weight: expected only the 25 tensors" in failure(drafter)


def test_fewer_layers_than_stored(drafter: Path) -> None:
    change_config(drafter, num_hidden_layers=1)
    assert "layers.1." in failure(drafter)


def test_no_folder_no_weights_no_config(drafter: Path) -> None:
    assert "found none" in failure(drafter / "absent")
    (drafter / WEIGHTS).rename(drafter / "pytorch_model.bin")
    assert "found pytorch_model.bin; convert the weights to safetensors" in failure(drafter)
    (drafter / "pytorch_model.bin").rename(drafter / WEIGHTS)
    (drafter / "config.json").unlink()
    assert "config.json: expected a drafter's config, found none" in failure(drafter)
    (drafter / "config.json").write_text("{")
    assert "config.json: expected JSON" in failure(drafter)
    (drafter / "config.json").write_text("[]")
    assert "config.json: expected an object, found list" in failure(drafter)


def test_index_that_points_elsewhere_or_at_nothing(drafter: Path) -> None:
    file_of = shard(drafter)
    first = sorted(file_of)[0]

    def with_map(changed: Any) -> str:
        (drafter / INDEX).write_text(json.dumps({"weight_map": changed}))
        return failure(drafter)

    assert "expected a file name, found '../x.safetensors'" in with_map({first: "../x.safetensors"})
    assert "found '/etc/passwd'" in with_map({first: "/etc/passwd"})
    assert "gone.safetensors: expected a safetensors file" in with_map({first: "gone.safetensors"})
    assert "norm2: expected this tensor" in with_map({"norm2": file_of[first]})
    assert "weight_map: expected an object" in with_map([1])
    (drafter / INDEX).write_text("{}")
    assert "weight_map" in failure(drafter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "expected DFlashDraftModel, found Llama"),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size: expected a whole number"),
        ({"conv_kernel_size": 3}, "conv_group_size: expected a whole number"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type: expected dflash"),
        ({"dflash_config": {"shift_label": True}}, "shift_label: expected none, found True"),
        ({"attention_modes": ["gqa", "kda"]}, "attention_modes: expected gqa or mha"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type: expected dflash"),
        ({"speculators_model_type": "dflash"}, "transformer_layer_config: expected an object"),
        ({"hidden_size": 0}, "hidden_size: expected a whole number of at least 1, found 0"),
        ({"hidden_size": "x"}, "not readable as a Qwen3 configuration"),
        ({"num_attention_heads": 3}, "num_key_value_heads: expected a divisor"),
        ({"head_dim": 15}, "an even rotary dimension, but got `head_dim`=15"),
        ({"block_size": 1}, "block_size: expected a whole number of at least 2, found 1"),
        ({"dflash_config": [1]}, "dflash_config: expected an object"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id: expected a whole number"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4]}},
            "target_layer_ids: expected layer numbers from 0 to 3, found [0, 4]",
        ),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 3, "output_multiplier": "x"}}, "output_multiplier"),
        ({"rope_parameters": DYNAMIC_ROPE}, "rope_type: expected one of default"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(
    drafter: Path, changes: dict[str, Any], words: str
) -> None:
    change_config(drafter, **changes)
    message = failure(drafter)
    assert words in message
    assert "drafter" in message


def test_convolutions_that_the_configuration_does_not_mention_are_refused(drafter: Path) -> None:
    change_tensors(
        drafter, lambda t: t.update({"layers.0.mlp_conv.base_kernel": torch.zeros(2, 3, 64)})
    )
    assert "layers.0.mlp_conv.base_kernel: expected only the 25" in failure(drafter)


def test_architecture_names_of_other_trainers_are_read(drafter: Path) -> None:
    for names in (["SpecForgeDFlashModel"], []):
        change_config(drafter, architectures=names)
        load_drafter(drafter)


def test_target_tensors_tied_and_not(target: Path, tmp_path: Path) -> None:
    tied = load_target_tensors(target, tied=True)
    assert tied.head is tied.embedding
    assert tied.embedding.shape == (320, 64)
    with pytest.raises(CheckpointError, match=r"expected the target's head .*lm_head.weight"):
        load_target_tensors(target, tied=False)
    untied = load_target_tensors(tiny_target(tmp_path / "qwen3", "qwen3"), tied=False)
    assert not torch.equal(untied.head, untied.embedding)
    gpt2 = load_target_tensors(tiny_target(tmp_path / "gpt2", "gpt2"), tied=True)
    assert gpt2.embedding.shape == (320, 64)


def test_target_tensors_of_nested_names_bias_and_ties_written_out(tmp_path: Path) -> None:
    embedding, head = torch.randn(10, 4), torch.randn(10, 4)
    file = tmp_path / WEIGHTS

    def load(tensors: dict[str, torch.Tensor]) -> TargetTensors:
        save_file({name: t.clone() for name, t in tensors.items()}, file)
        return load_target_tensors(tmp_path, tied=False)

    nested = {
        "model.language_model.embed_tokens.weight": embedding,
        "model.visual.embed_tokens.weight": torch.randn(3, 4),
        "lm_head.weight": head,
        "lm_head.bias": torch.arange(10.0),
    }
    loaded = load(nested)
    assert torch.equal(loaded.embedding, embedding)
    assert torch.equal(loaded.head, head)
    assert loaded.head_bias is not None
    written_out = load({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
    assert written_out.head is written_out.embedding
    for broken, words in (
        ({"a.embed_tokens.weight": embedding, "b.embed_tokens.weight": embedding}, "expected one"),
        ({"model.embed_tokens.weight": embedding, "lm_head.weight": torch.zeros(10, 5)}, "[10, 5]"),
        ({"model.embed_tokens.weight": torch.zeros(4)}, "[vocabulary, hidden]"),
        ({"model.norm.weight": torch.zeros(4)}, "input embedding"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            load(broken)


def test_a_drafter_for_another_target_is_refused_at_load(drafter: Path) -> None:
    config = DrafterConfig.load(drafter)
    tensors = DraftVocabulary(torch.zeros(320, 64), torch.zeros(320, 64))
    facts = {"name": "t", "hidden_size": 64, "num_layers": 4, "vocab_size": 320}
    check_drafter(config, tensors, ModelFacts(**facts))
    for changes, words in (
        ({"hidden_size": 32}, "hidden size: the drafter expects 64, the target has 32"),
        ({"num_layers": 6}, "number of layers: the drafter expects 4, the target has 6"),
        ({"vocab_size": 99}, "vocabulary size: the drafter expects 320, the target has 99"),
    ):
        with pytest.raises(Incompatible, match=words):
            check_drafter(config, tensors, ModelFacts(**{**facts, **changes}))
    narrow = DraftVocabulary(torch.zeros(320, 60), torch.zeros(320, 60))
    with pytest.raises(Incompatible, match="embedding width"):
        check_drafter(config, narrow, ModelFacts(**facts))
    short = DraftVocabulary(torch.zeros(3, 64), torch.zeros(3, 64))
    with pytest.raises(Incompatible, match="mask token id"):
        check_drafter(config, short, ModelFacts(**facts))


def test_layer_ids_past_a_target_of_unknown_depth_are_refused(drafter: Path) -> None:
    change_config(drafter, num_target_layers=None)
    config = DrafterConfig.load(drafter)
    tensors = DraftVocabulary(torch.zeros(320, 64), torch.zeros(320, 64))
    shallow = ModelFacts(name="t", hidden_size=64, num_layers=2, vocab_size=320)
    with pytest.raises(Incompatible, match=r"target layer ids: the drafter expects \[0, 2, 2\]"):
        check_drafter(config, tensors, shallow)
