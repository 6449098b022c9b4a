"""Compiling beside a service that already serves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable
from contextlib import suppress

from target_service.settings import TargetSettings

log = logging.getLogger(__name__)

# Requests that came for the start come first; compiling takes all cores that it gets.
_DELAY_S = 10.0
_NICENESS = 19
_KILL_AFTER_S = 5.0
_LOG_TAIL_BYTES = 2000


def command(settings: TargetSettings) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a process that compiles the settings' target.

    It ends with this process.
    """
    given = settings.model_dump(include={"model", "dtype", "device", "threads", "numerics"})
    variables = {f"FLASHDUET_TARGET_{name.upper()}": str(value) for name, value in given.items()}
    arguments = [sys.executable, "-m", "target_service.compiled", "--parent", str(os.getpid())]
    return arguments, {**os.environ, **variables}


def last_line(said: bytes, status: int) -> str:
    """The end of a child's log, which is why it failed."""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the compiler ended with status {status}"


class BackgroundCompilation:
    """Runs the command above once, some time after the start.

    Args:
        settings: of this service.
        adopt: called in the event loop once the pass is there.
    """

    def __init__(self, settings: TargetSettings, adopt: Callable[[], Awaitable[None]]) -> None:
        self._settings = settings
        self._adopt = adopt
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the compiler, wherever it is."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        await asyncio.sleep(_DELAY_S)
        arguments, environment = command(self._settings)
        try:
            child = await asyncio.create_subprocess_exec(
                *arguments,
                env=environment,
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("steps stay uncompiled: no process for the compiler: %s", error)
            return
        log.info("compiling in the background; steps run uncompiled until it is done")
        # A fork's own way of setting this is not safe beside threads.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
        try:
            tail = await _tail(child)
            status = await child.wait()
            if status:
                log.warning("steps stay uncompiled: %s", last_line(tail, status))
            else:
                await self._adopt()
        except Exception:
            log.exception("steps stay uncompiled")
        finally:
            await _end(child)


async def _tail(child: Process) -> bytes:
    assert child.stderr is not None
    tail = b""
    while block := await child.stderr.read(65536):
        tail = (tail + block)[-_LOG_TAIL_BYTES:]
    return tail


async def _end(child: Process) -> None:
    """The process group: a compiler has children of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _KILL_AFTER_S)
