"""Our own machine code of compiled passes: made once a machine, kept in the user's cache.

With the library in `native/` the operators `flashduet::attend` and `flashduet::product` have
kernels of their own, and a whole pass runs without the interpreter and its lock. Without it they
are computed in Python.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import torch
from filelock import Timeout

import flashduet.native
from flashduet.errors import ConfigurationError
from flashduet.models_cache import cache_root, locked, put_in_place, staging
from target_service.compiled.checks import check_attention
from target_service.compiled.package import NO_COMPILER, compiler, processor

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "native"
_PRODUCT = Path(flashduet.native.__file__).parent / "product.h"
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fopenmp",
    "-fPIC",
    "-shared",
    # Vectors wider than the processor's are split; no other code is called with them.
    "-Wno-psabi",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)
_COMPILER_TIMEOUT_S = 1200
_loading = threading.Lock()
_loaded = False


def library_path() -> Path:
    """The file for these sources, machine and PyTorch, there or not."""
    made_of = [" ".join(_FLAGS), torch.__version__, processor()]
    made_of += [
        file.name + "\n" + file.read_text() for file in (*sorted(_SOURCES.iterdir()), _PRODUCT)
    ]
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    return cache_root() / "native" / f"attend-{digest[:16]}.so"


def build_library() -> Path:
    """The library, compiled if it is not there; half a minute, so leave it to a child process.

    Raises:
        ConfigurationError: it cannot be compiled, or computes something else; says why.
    """
    path = library_path()
    try:
        with locked(path.stem):
            if not path.is_file():
                with staging(path.parent) as room:
                    made = room / path.name
                    _compile(made)
                    with _loading:
                        _try(made)
                    put_in_place(made, path)
    except Timeout as error:
        raise ConfigurationError(f"another process is compiling {path.name}") from error
    except OSError as error:
        raise ConfigurationError(f"the cache cannot be written: {error}") from error
    return path


def load_library() -> bool:
    """Give the operator its native kernel, for the rest of the process, if the library is there.

    Otherwise the log says so.
    """
    global _loaded
    with _loading:
        if not _loaded:
            _loaded = _load(library_path())
    return _loaded


def _load(path: Path) -> bool:
    if not path.is_file():
        log.info("attention of compiled passes runs in Python: its library is not compiled yet")
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        log.warning("attention of compiled passes runs in Python: %s", error)
        # Cut short, perhaps, when a machine went down; it is made again.
        with suppress(OSError):
            path.unlink()
        return False
    return True


def _try(path: Path) -> None:
    global _loaded
    if _loaded:
        return  # from another cache; what it defines can be there only once
    try:
        torch.ops.load_library(str(path))
        check_attention()
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"compiled attention cannot be used: {error}") from error
    _loaded = True


def _compile(path: Path) -> None:
    program = compiler()
    if program is None:
        raise ConfigurationError(NO_COMPILER)
    root = Path(torch.__file__).parent
    arguments = [program, *_FLAGS]
    for folder in ("include", "include/torch/csrc/api/include"):
        arguments += ["-isystem", str(root / folder)]
    arguments += ["-I", str(_PRODUCT.parent)]
    arguments += [str(_SOURCES / "pass.cpp"), "-o", str(path)]
    # Found by their names at run time: PyTorch has loaded them by then.
    arguments += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"attention cannot be compiled: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason told"]
        raise ConfigurationError(f"attention cannot be compiled: {lines[0][:300]}")
