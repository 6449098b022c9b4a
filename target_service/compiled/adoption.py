"""Getting a compiled pass into an engine: from the cache at start, else compiled meanwhile."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from flashduet.errors import ConfigurationError
from target_service.compiled.background import BackgroundCompilation, command, last_line
from target_service.compiled.build import obstacle
from target_service.compiled.library import library_path
from target_service.compiled.model import CompiledModel
from target_service.compiled.package import package_path
from target_service.engine import Engine
from target_service.load import LoadedTarget
from target_service.settings import TargetSettings

log = logging.getLogger(__name__)


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
    complete = package.is_file() and library_path().is_file()
    if not complete and settings.compile == "wait":
        log.info("compiling the target; FLASHDUET_TARGET_COMPILE=auto would serve meanwhile")
        arguments, environment = command(settings)
        done = subprocess.run(
            arguments, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        if done.returncode:
            log.warning("steps stay uncompiled: %s", last_line(done.stderr, done.returncode))
            return None
    if package.is_file() and _adopt(engine, package) and complete:
        return None
    return Adoption(settings, engine, package) if settings.compile == "auto" else None


def _adopt(engine: Engine, package: Path) -> bool:
    """Load and offer the pass; a file that does not do is removed, to be made again."""
    if engine.compiled:  # what was missing was the library
        if library_path().is_file():
            log.info("attention of compiled passes runs natively from the next start on")
        return True
    started = time.perf_counter()
    try:
        engine.offer(CompiledModel(package, engine.packed.layers))
    except (RuntimeError, ConfigurationError, OSError) as error:
        package.unlink(missing_ok=True)
        log.warning("%s is removed, it does not do: %s", package, str(error).splitlines()[0])
        return False
    log.info("steps run compiled (loaded in %.1f s)", time.perf_counter() - started)
    return True
