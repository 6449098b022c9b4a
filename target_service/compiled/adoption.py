"""Getting a compiled pass into an engine: from the cache at start, else compiled meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from flashduet.errors import ConfigurationError
from flashduet.hardware import available_memory
from target_service.compiled.background import BackgroundCompilation, command, last_line
from target_service.compiled.build import obstacle
from target_service.compiled.library import library_path
from target_service.compiled.model import CompiledModel
from target_service.compiled.package import NO_COMPILER, compiler, failure_path, package_path
from target_service.engine import Engine
from target_service.load import LoadedTarget
from target_service.settings import TargetSettings

log = logging.getLogger(__name__)

# The compiler's process holds the weights as loaded, packed, in the code and read again.
_MEMORY_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Adoption:
    """A package, or the library for it, that is not there yet, and the engine that waits for it."""

    settings: TargetSettings
    engine: Engine
    package: Path

    def begin(self) -> BackgroundCompilation:
        """Compile beside the service; call it in the event loop."""
        compilation = BackgroundCompilation(self.settings, self._adopt)
        compilation.start()
        return compilation

    async def _adopt(self) -> None:
        await asyncio.to_thread(_adopt, self.engine, self.package)


def adopt_or_plan(
    settings: TargetSettings, target: LoadedTarget, engine: Engine
) -> Adoption | None:
    """Let a warmed-up engine run compiled passes if they are in the cache or are waited for.

    Returns:
        what to do once the service serves, or None.
    """
    if settings.compile == "off":
        return None
    if reason := obstacle(settings, target):
        log.info("steps run uncompiled: %s", reason)
        return None
    package = package_path(target, torch.get_num_threads())
    complete = package.is_dir() and library_path().is_file()
    if not complete and (reason := _hindrance(target, package)):
        log.info("steps run uncompiled: %s", reason)
        return None
    if not complete and settings.compile == "wait":
        log.info("compiling the target; FLASHDUET_TARGET_COMPILE=auto would serve meanwhile")
        arguments, environment = command(settings)
        done = subprocess.run(
            arguments,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        if done.returncode:
            log.warning("steps stay uncompiled: %s", last_line(done.stderr, done.returncode))
            return None
    if package.is_dir() and (not _adopt(engine, package) or complete):
        return None
    return Adoption(settings, engine, package) if settings.compile == "auto" else None


def _hindrance(target: LoadedTarget, package: Path) -> str | None:
    """Why compiling would only cost time, or None."""
    if compiler() is None:
        return NO_COMPILER
    failure = failure_path(package)
    if not package.is_dir() and failure.is_file():
        return f"{failure.read_text().strip()} (to try again, remove {failure})"
    needed = _MEMORY_FACTOR * target.weight_bytes
    if available_memory() < needed:
        return f"compiling takes about {needed >> 20} MiB of memory, more than is free"
    try:
        package.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"the cache cannot be written: {error}"
    if not os.access(package.parent, os.W_OK):
        return f"the cache cannot be written: {package.parent}"
    return None


def _adopt(engine: Engine, package: Path) -> bool:
    """Load and offer the pass; one that computes something else is removed."""
    if engine.compiled:  # what was missing was the library
        if library_path().is_file():
            log.info("attention of compiled passes runs natively from the next start on")
        return True
    started = time.perf_counter()
    try:
        engine.offer(CompiledModel(package, engine.packed.layers))
    except ConfigurationError as error:
        shutil.rmtree(package, ignore_errors=True)
        log.warning("steps stay uncompiled: %s is removed: %s", package, error.message)
        return False
    except (RuntimeError, OSError) as error:
        # Of memory or the disk perhaps, and gone the next time.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning("steps stay uncompiled: %s cannot be loaded: %s", package, reason)
        return False
    log.info("steps run compiled (loaded in %.1f s)", time.perf_counter() - started)
    return True
