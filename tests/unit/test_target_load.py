"""A checkpoint that cannot serve is refused at start, with file, tensor, expected and found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from flashduet.errors import CheckpointError, ConfigurationError
from flashduet.v1 import common_pb2
from target_service.engine import Engine
from target_service.load import load_target
from target_service.settings import TargetSettings
from tests.support.tiny import tiny_target

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "tiny", "qwen3")


def load(folder: Path, **settings: object):  # type: ignore[no-untyped-def]
    return load_target(TargetSettings(model=str(folder), **{"device": "cpu"} | settings))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "expected", "wire"),
    [
        ("float32", torch.float32, common_pb2.DATA_TYPE_FLOAT32),
        ("bfloat16", torch.bfloat16, common_pb2.DATA_TYPE_BFLOAT16),
    ],
)
def test_the_dtype_is_the_one_asked_for(
    folder: Path, dtype: str, expected: torch.dtype, wire: int
) -> None:
    target = load(folder, dtype=dtype)
    assert target.dtype is expected
    assert target.facts.data_type == wire
    assert next(target.model.parameters()).dtype is expected


def test_a_name_and_a_smaller_window(folder: Path) -> None:
    facts = load(folder, name="mine", context_window=100).facts
    assert (facts.name, facts.context_window) == ("mine", 100)
    assert load(folder, context_window=9999).facts.context_window == 512


def test_kv_bytes_are_those_that_the_store_takes(folder: Path) -> None:
    target = load(folder)
    assert Engine(target, 9, 16).kv.nbytes == 160 * target.kv_bytes_per_token


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_as_they_are_served(tmp_path: Path, tied: bool) -> None:
    """Before they are packed and after; only a tied head is held twice."""
    target = load(tiny_target(tmp_path, "llama", tie_word_embeddings=tied))
    loaded = sum(part.nbytes for part in target.model.parameters())
    planned = target.weight_bytes
    Engine(target, 9, 16)
    assert planned == target.weight_bytes
    # Two stand-ins for a tied head: the embedding and the packed copy.
    assert planned - loaded == (320 * 64 * 4 if tied else 0)


def test_a_truncated_file_is_named(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    edit(folder, lambda weights: weights.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name}.*not found"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda weights: weights.update({name: torch.zeros(100, 64)}))
    with pytest.raises(CheckpointError, match=rf"{name}.*\[128, 64\] expected, found \[100, 64\]"):
        load(folder)


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"safetensors expected"):
        load(folder)


@pytest.mark.parametrize(("kind", "words"), [("mamba", "recurrent"), ("clip", "causal language")])
def test_a_wrong_architecture_is_named(folder: Path, kind: str, words: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(folder)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    """BERT loads as a language model, and nothing in its config says that it cannot be one here."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", intermediate_size=64, vocab_size=320, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            # An untouched random model hardly attends to anything.
            weight.mul_(10.0 if weight.dim() > 1 else 1.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="bert"):
        Engine(load(tmp_path), 10, 16)


def test_a_model_that_packed_passes_run_wrongly_is_refused(folder: Path) -> None:
    engine = Engine(load(folder), 10, 16)

    def shift(module: object, arguments: tuple, given: dict) -> tuple[tuple, dict]:
        return arguments, given | {"position_ids": given["position_ids"].clamp(max=16)}

    handle = engine.packed.model.register_forward_pre_hook(shift, with_kwargs=True)
    with pytest.raises(CheckpointError, match="differ"):
        engine.warm_up()
    handle.remove()
    engine.warm_up()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_here_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="use cpu or auto"):
        load(folder, device="cuda")


def test_settings_name_the_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDUET_TARGET_DEVICE", "gpu")
    with pytest.raises(ConfigurationError, match="FLASHDUET_TARGET_DEVICE"):
        TargetSettings.load()
