"""The user's cache of models: where it is, and how a GGUF file becomes a safetensors folder in it.

A folder appears in the cache whole or not at all: it is written under another name and renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from flashduet.errors import CheckpointError, ConfigurationError

CACHE_VARIABLE = "FLASHDUET_CACHE"
# Another process may be dequantizing the same file; a large one takes minutes.
_LOCK_TIMEOUT_S = 1800.0

# (stage, bytes done, bytes in all); all is 0 where it is not known.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


def cache_root() -> Path:
    """`FLASHDUET_CACHE`, or the platform's cache folder of this user."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("flashduet"))


def locked(name: str) -> FileLock:
    """A lock between processes on one entry of the cache; use it as a context manager."""
    folder = cache_root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock", timeout=_LOCK_TIMEOUT_S)


def sha256_of(path: Path, progress: Progress = no_progress, stage: str = "checking") -> str:
    """Hex digest of a file's content."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            progress(stage, done, total)
    return digest.hexdigest()


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
            f"another process has been preparing {name} for {_LOCK_TIMEOUT_S:.0f} s; "
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
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        # float32 holds every dequantized value exactly.
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        _forget_quantization(model)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        staging.chmod(0o755)
        staging.rename(folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the tokenizer's Rust code is no Exception
        raise CheckpointError(
            f"{source.name}: not readable as a GGUF checkpoint of a causal language model: {error}"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
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
