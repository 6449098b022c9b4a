"""Compile a target's pass and put it into the cache; minutes of work, in a process of its own."""

from __future__ import annotations

import logging
import os
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import Timeout

from flashduet.errors import ConfigurationError
from flashduet.hardware import compute_threads
from flashduet.models_cache import locked, put_in_place, staging
from target_service.compiled.checks import check_logits
from target_service.compiled.graph import trace
from target_service.compiled.library import build_library
from target_service.compiled.model import CompiledModel
from target_service.compiled.package import NO_COMPILER, compiler, failure_path, package_path
from target_service.load import LoadedTarget, load_target
from target_service.settings import TargetSettings
from target_service.survey import vary

log = logging.getLogger(__name__)

_PROBE_TOKENS = 24
_CONFIG = {
    # Constants are folded, and weights that stayed linear layers are packed.
    "freezing": True,
    # What is precompiled for later compilations stays in the temporary folder for good.
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
}


def build(settings: TargetSettings) -> Path:
    """The compiled pass of the target that the settings name, made if it is not there.

    Raises:
        ConfigurationError: it cannot be compiled; says why.
        CheckpointError: the target cannot be loaded.
    """
    threads = compute_threads(settings.threads)
    torch.set_num_threads(threads)
    target = load_target(settings)
    refuse(settings, target)
    path = package_path(target, threads)
    try:
        build_library()
    except ConfigurationError as error:
        log.warning("passes come back to Python for attention: %s", error.message)
    try:
        with locked(path.name):
            if not path.is_dir():
                log.info("compiling %s, which takes minutes", target.facts.name)
                started = time.perf_counter()
                _compile_or_note(target, path)
                log.info("compiled in %.0f s: %s", time.perf_counter() - started, path)
    except Timeout as error:
        raise ConfigurationError(f"another process is compiling {path.name}") from error
    except OSError as error:
        raise ConfigurationError(f"the cache cannot be written: {error}") from error
    return path


def _compile_or_note(target: LoadedTarget, path: Path) -> None:
    """`compile_pass`; a reason that will be the same next time is kept for later starts."""
    if compiler() is None:
        raise ConfigurationError(NO_COMPILER)
    failure = failure_path(path)
    try:
        compile_pass(target, path)
    except ConfigurationError as error:
        failure.write_text(error.message + "\n")
        raise
    failure.unlink(missing_ok=True)


def refuse(settings: TargetSettings, target: LoadedTarget) -> None:
    """Raises ConfigurationError where a compiled pass is not to be had; says why."""
    if reason := obstacle(settings, target):
        raise ConfigurationError(f"{target.facts.name} is not compiled: {reason}")


def obstacle(settings: TargetSettings, target: LoadedTarget) -> str | None:
    """Why no compiled pass is to be had, or None."""
    if target.device.type != "cpu":
        return "compiled passes are for CPUs"
    if target.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"in {str(target.dtype).removeprefix('torch.')} passes stay as they are; "
            "bfloat16 and float16 are compiled"
        )
    if settings.numerics != "fast":
        return f"numerics={settings.numerics} wants passes of one make"
    return None


def compile_pass(target: LoadedTarget, path: Path) -> None:
    """Trace and compile the target's pass and put it into a folder, which is there whole or not.

    Raises:
        ConfigurationError: it cannot be compiled, or computes something else; says why.
    """
    if compiler() is None:
        raise ConfigurationError(NO_COMPILER)
    name, ids = target.facts.name, vary(_PROBE_TOKENS, target.config.vocab_size)
    with torch.inference_mode():
        plain = target.model(input_ids=ids, use_cache=False).logits[0]
    with staging(path.parent) as room:
        try:
            program, layers = trace(target)
            with torch.no_grad(), _working_in(room / "work"):
                made = torch._inductor.aoti_compile_and_package(
                    program, package_path=str(room / "package.pt2"), inductor_configs=_CONFIG
                )
            unpacked = _unpack(Path(made), room / "package")
            check_logits(CompiledModel(unpacked, layers).probe(ids, target.dtype), plain)
        except ConfigurationError:
            raise
        except Exception as error:  # whatever a tracer or a compiler finds no answer to
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            raise ConfigurationError(f"{name} cannot be compiled: {reason}") from error
        put_in_place(unpacked, path)


def _unpack(archive: Path, folder: Path) -> Path:
    """An archive as a folder, which is loaded as it lies; PyTorch would unpack an archive into
    the system's temporary folder at every start, and leave it there when it is killed."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    archive.unlink()
    (inner,) = folder.iterdir()
    return inner


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Let the compiler keep what it needs on the way in this folder, unless it was told another."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str(folder)
    try:
        yield
    finally:
        del os.environ[variable]
