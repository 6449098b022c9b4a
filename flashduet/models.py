"""From a model's name to a local Hugging Face folder, and what such a folder says about itself.

Imports neither torch nor transformers at the top: the command line and the gateway use this module
for names and folders alone.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashduet.errors import CheckpointError, ConfigurationError
from flashduet.models_cache import Progress, no_progress
from flashduet.models_default import DEFAULT_TARGET_NAME, fetch_default_target
from flashduet.models_gguf import cached_gguf_folder

if TYPE_CHECKING:
    from flashduet.v1.common_pb2 import ModelFacts

DEFAULT_NAMES = ("default", DEFAULT_TARGET_NAME)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Weights as safetensors only: a pickle is never opened.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
# The same weights once more, in their makers' own layouts.
_HUB_DUPLICATES = ["original/*", "consolidated*"]

# Layer kinds whose state is keys and values by position, so that rollback is a length change.
_ATTENTION_LAYERS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "moe",
    "mlp",
}
# Recurrent families that say so only by their names.
_RECURRENT_TYPES = {
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "xlstm",
    "recurrent_gemma",
    "jamba",
    "bamba",
    "zamba",
    "zamba2",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
}
# Scalings whose frequencies change for all positions once a sequence passes the trained length.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def resolve_model(
    reference: str, *, allow_download: bool = True, progress: Progress = no_progress
) -> Path:
    """The local folder (config.json, safetensors, tokenizer) that `reference` names.

    Args:
        reference: `default` (or its name), a local folder, a local `.gguf` file, a Hub id, or
            `hub/id:file.gguf`. GGUF files are dequantized once into the user's cache.
        allow_download: false looks only at what is on this machine.
        progress: called with (stage, bytes done, bytes in all) while something takes long.

    Raises:
        ConfigurationError: nothing by that name, or it cannot be had; names the fix.
        CheckpointError: it is there, and it is not a readable checkpoint.
    """
    if reference.lower() in DEFAULT_NAMES:
        source = fetch_default_target(allow_download=allow_download, progress=progress)
        return cached_gguf_folder(source, DEFAULT_TARGET_NAME, progress=progress)
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: config.json expected, not found in the folder")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigurationError(f"{path}: a .gguf file or a folder expected")
        return cached_gguf_folder(path, path.stem, progress=progress)
    hub_id, _, file_name = reference.partition(":")
    if _HUB_ID.fullmatch(hub_id):
        if not file_name:
            return _hub_folder(hub_id, allow_download)
        if file_name.endswith(".gguf"):
            source = _hub_file(hub_id, file_name, allow_download)
            return cached_gguf_folder(source, Path(file_name).stem, progress=progress)
    raise ConfigurationError(
        f"model {reference!r}: no such folder or file, and not a Hub id; give 'default', a folder "
        "with config.json, a .gguf file, owner/name, or owner/name:file.gguf"
    )


def served_name(reference: str) -> str:
    """The name that clients use for the model when none is configured."""
    if reference.lower() in DEFAULT_NAMES:
        return DEFAULT_TARGET_NAME
    path = Path(reference).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if reference.endswith(".gguf") else reference


def load_config(folder: Path) -> Any:
    """The folder's config as Transformers reads it (a `PreTrainedConfig`).

    Raises:
        CheckpointError: config.json is missing, broken, or of an unknown architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: not readable: {error}") from error


def text_config(config: Any) -> Any:
    """The decoder's own config: a multimodal config holds it one level down."""
    return config.get_text_config(decoder=True)


def check_target_supported(config: Any) -> None:
    """Refuse targets that one causal pass over keys and values cannot verify.

    Raises:
        CheckpointError: names the architecture and the reason.
    """
    text = text_config(config)
    kind = text.model_type
    foreign = sorted(
        {str(layer) for key in ("layer_types", "layers_block_type", "block_types")
         for layer in getattr(text, key, None) or ()} - _ATTENTION_LAYERS
    )  # fmt: skip
    if foreign or kind in _RECURRENT_TYPES:
        named = f" ({', '.join(foreign)})" if foreign else ""
        raise CheckpointError(
            f"model_type {kind!r}{named}: recurrent or linear-attention layers cannot be rolled "
            "back by length after a rejected draft; choose a target with attention layers only"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"model_type {kind!r}: a decoder-only causal model is expected")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise CheckpointError(f"model_type {kind!r}: attention is not causal")


def context_window(config: Any) -> int:
    """Longest sequence in tokens that the target is served with.

    With frequencies that depend on the sequence's length, keys cached earlier would be wrong once
    the trained length is passed, so the window ends there.
    """
    text = text_config(config)
    window = int(getattr(text, "max_position_embeddings", 0) or 0)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        window = int(original or window)
    if window <= 0:
        raise CheckpointError(
            f"config.json: max_position_embeddings expected, found {window} "
            f"(model_type {text.model_type!r})"
        )
    return window


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 (hex) of the tokenizer's sorted (token, id) pairs; empty without a tokenizer.

    Two checkpoints with the same hash give the same meaning to every token id.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return ""
    try:
        vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: tokenizer not readable: {error}") from error
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items()):
        digest.update(f"{token}\0{index}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def model_facts(folder: Path, name: str, data_type: int) -> ModelFacts:
    """What the Ingest handshake compares.

    Args:
        folder: of the target's checkpoint.
        name: that clients use.
        data_type: the `DataType` in which the target computes.

    Raises:
        CheckpointError: config or tokenizer cannot be read.
    """
    from flashduet.v1.common_pb2 import ModelFacts

    config = load_config(folder)
    text = text_config(config)
    return ModelFacts(
        name=name,
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        tokenizer_hash=tokenizer_hash(folder),
        context_window=context_window(config),
        data_type=data_type,  # type: ignore[arg-type]
    )


def _hub_folder(hub_id: str, allow_download: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            hub_id,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_DUPLICATES,
            local_files_only=not allow_download,
        )
    except Exception as error:
        raise _not_had(hub_id, error) from error
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{hub_id}: config.json expected, not found in the repository")
    return Path(folder)


def _hub_file(hub_id: str, file_name: str, allow_download: bool) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, file_name, local_files_only=not allow_download))
    except Exception as error:
        raise _not_had(f"{hub_id}:{file_name}", error) from error


def _not_had(reference: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"model {reference!r} cannot be had from the Hub ({type(error).__name__}); check the name, "
        "the network and HF_TOKEN, or give a local folder"
    )
