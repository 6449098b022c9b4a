"""Where a compiled pass is kept: a folder in the user's cache for all that it was made of."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from pathlib import Path

import torch
import transformers

from flashduet.models_cache import cache_root
from target_service.load import LoadedTarget

# Raised when the graph, the operator in it, or what goes in and comes out changes.
_FORMAT = 2
_COMPILERS = ("g++", "clang++", "c++")
NO_COMPILER = "no C++ compiler found; install g++ (Debian: apt-get install g++) or set CXX"


def package_path(target: LoadedTarget, threads: int) -> Path:
    """The folder for this model, type, machine and versions, there or not.

    Args:
        threads: that the pass runs with; the code is made for their number.
    """
    made_of = {
        "format": _FORMAT,
        "dtype": str(target.dtype),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor(),
        "weights": _weights(target.folder),
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return cache_root() / "compiled" / f"{target.folder.name}-{digest[:16]}"


def failure_path(package: Path) -> Path:
    """Where the reason stands why this package could not be made."""
    return package.with_name(package.name + ".failed")


def compiler() -> str | None:
    """The C++ compiler that will be used, or None."""
    import torch._inductor.config

    named = torch._inductor.config.cpp.cxx
    names = [name for name in (named if isinstance(named, tuple | list) else (named,)) if name]
    return next((found for name in (*names, *_COMPILERS) if (found := shutil.which(name))), None)


def processor() -> str:
    """What the compiler's -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    told = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(told)])


def _weights(folder: Path) -> list[tuple[str, int, int]]:
    """Files by name, size and time of change: reading them all would take longer than a start."""
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    told = [(file.name, file.stat()) for file in files]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in told]
