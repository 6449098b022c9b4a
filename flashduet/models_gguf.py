"""How a GGUF file becomes a safetensors folder in the user's cache, on first use."""

from __future__ import annotations

from pathlib import Path

from filelock import Timeout

from flashduet.errors import CheckpointError, ConfigurationError
from flashduet.models_cache import (
    LOCK_TIMEOUT_S,
    Progress,
    cache_root,
    locked,
    no_progress,
    put_in_place,
    sha256_of,
    staging,
)


def cached_gguf_folder(source: Path, name: str, *, progress: Progress = no_progress) -> Path:
    """The dequantized folder of the GGUF file `source`, made on first use.

    The folder's key is the file's content, so a changed file gets a new one.

    Raises:
        CheckpointError: Transformers cannot read the file.
        ConfigurationError: another process has held the cache entry for too long.
    """
    key = f"{name}-{sha256_of(source, progress)[:16]}"
    folder = cache_root() / "models" / key
    if (folder / "config.json").is_file():
        return folder
    try:
        with locked(key):
            if not (folder / "config.json").is_file():
                _dequantize(source, folder, progress)
    except Timeout as error:
        raise ConfigurationError(
            f"another process has been preparing {name} for {LOCK_TIMEOUT_S:.0f} s; "
            "end it and start again"
        ) from error
    return folder


def _dequantize(source: Path, folder: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # ours is `progress`
    size = source.stat().st_size
    progress("dequantizing", 0, size)
    with staging(folder.parent) as room:
        try:
            where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
            tokenizer = AutoTokenizer.from_pretrained(**where)
            # float32 holds every dequantized value exactly.
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            _forget_quantization(model)
            made = room / folder.name
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the tokenizer's Rust code is no Exception
            raise CheckpointError(
                f"{source.name}: not readable as a GGUF checkpoint of a causal language model: "
                f"{error}"
            ) from error
        put_in_place(made, folder)
    progress("dequantizing", size, size)


def _forget_quantization(model: object) -> None:
    """The weights are plain now, but `save_pretrained` refuses a model still marked as GGUF."""
    config = model.config  # type: ignore[attr-defined]
    for holder, name in (
        (config, "quantization_config"),
        (config, "_pre_quantization_dtype"),
        (model, "hf_quantizer"),
        (model, "quantization_method"),
    ):
        if name in vars(holder):
            delattr(holder, name)
    model.is_quantized = False  # type: ignore[attr-defined]
