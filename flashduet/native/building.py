"""Libraries of our own machine code: compiled once a machine, kept in the user's cache.

A C++ compiler takes a second or two for one, at the first start. Everything works without them,
slower: `load_library` gives None then, and the log says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashduet.models_cache import cache_root, put_in_place, staging

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=c++20")
_COMPILERS = ("g++", "clang++", "c++")
_COMPILER_TIMEOUT_S = 60
_CPU_INFO = Path("/proc/cpuinfo")
# What tells processors apart there: x86 has flags, ARM features and parts, RISC-V an isa.
_CPU_FACTS = ("flags", "features", "cpu implementer", "cpu part", "isa", "cpu")


class Unusable(Exception):
    """Why there is no library."""


@dataclass(frozen=True, slots=True)
class LibrarySource:
    """What a library is made of.

    Attributes:
        name: of the file; its folder in the cache is the plural.
        files: all of them, of which the last is compiled and includes the others.
        flags: the compiler's, beside those that all libraries get.
    """

    name: str
    files: Sequence[Path]
    flags: Sequence[str] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*_FLAGS, *self.flags, "-fPIC", "-shared")

    @property
    def path(self) -> Path:
        """Where it lies for these sources and this machine, compiled or not."""
        made_of = [" ".join(self.arguments), _machine()]
        made_of += [file.read_text() for file in self.files]
        digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
        return cache_root() / f"{self.name}s" / f"{self.name}-{digest[:16]}.so"


def load_library(
    source: LibrarySource, prepare: Callable[[ctypes.CDLL], None], instead: str
) -> ctypes.CDLL | None:
    """The library, compiled if need be; None where there is none.

    Args:
        prepare: declares what is in it and tries it; raises Unusable where it will not do.
        instead: what happens without it, for the log: "products run ...".
    """
    try:
        path = _built(source)
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            # Cut short, perhaps, when a machine went down.
            path.unlink(missing_ok=True)
            library = ctypes.CDLL(str(_built(source)))
        prepare(library)
    except (OSError, subprocess.SubprocessError, Unusable) as error:
        log.info("%s without machine code of our own: %s", instead, error)
        return None
    return library


def _built(source: LibrarySource) -> Path:
    path = source.path
    if path.is_file():
        return path
    named = os.environ.get("CXX")
    names = (named, *_COMPILERS) if named else _COMPILERS
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unusable("no C++ compiler was found")
    with staging(path.parent) as room:
        made = room / path.name
        arguments = [compiler, *source.arguments, str(source.files[-1]), "-o", str(made)]
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            errors="replace",  # in whichever encoding it complains
            timeout=_COMPILER_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise Unusable(f"{compiler} failed: {done.stderr.strip()[:300]}")
        # Others may be at it too; whoever comes last leaves the same.
        put_in_place(made, path)
    return path


def _machine() -> str:
    """What -march=native depends on, and the C library that is linked: a cache may be shared."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    told = {line for line in lines if line.partition(":")[0].strip().lower() in _CPU_FACTS}
    return "\n".join([sys.platform, platform.machine(), *platform.libc_ver(), *sorted(told)])
