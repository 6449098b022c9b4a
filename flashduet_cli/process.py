"""One service as a child process with a fresh interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping

# Called with the service's name and one line of its output, without the line's end.
LogSink = Callable[[str, str], None]

TAIL_LINES = 40
LINE_LIMIT_BYTES = 1 << 20
# A killed process ends at once unless a driver or a file system holds it.
KILLED_TIMEOUT_S = 10.0


class ServiceProcess:
    """Owns one child from start to its last byte of output.

    The child leads its own session: a terminal's Ctrl-C reaches only us, and whatever the child
    starts can be ended with it. It is executed, never forked from a process that holds gRPC.
    """

    def __init__(self, name: str, module: str, env: Mapping[str, str], log: LogSink) -> None:
        self.name = name
        # The last lines, for saying why a service did not come up.
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.started_at = 0.0
        self._module, self._env, self._log = module, dict(env), log
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, also after the child's end; None before its start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Exit status; minus the signal's number when a signal ended it; None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        self.started_at = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flashduet_cli.child",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
            limit=LINE_LIMIT_BYTES,
        )
        self._pump = asyncio.create_task(self._pump_output(), name=f"log-{self.name}")

    async def wait(self) -> int:
        """Wait for the child's end and its last output; its exit status."""
        if self._process is None or self._pump is None:
            raise RuntimeError(f"{self.name} was not started")
        status = await self._process.wait()
        self._kill_group()
        # The pipe ends with its last holder, which is gone now.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._pump), 2.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; nothing happens if it has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then after `grace_s` seconds SIGKILL, to all that the child started too."""
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except (TimeoutError, asyncio.CancelledError) as reason:
            self._kill_group()
            if isinstance(reason, asyncio.CancelledError):
                raise
            self._log(self.name, f"did not stop within {grace_s:g} s and was killed")
            try:
                await asyncio.wait_for(self.wait(), KILLED_TIMEOUT_S)
            except TimeoutError:
                self._log(self.name, f"process {self.pid} is stuck in the kernel; left behind")

    def _kill_group(self) -> None:
        if self._process is not None:
            # The group's id is not used again while a member lives; without members it is an error.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _pump_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        reader = self._process.stdout
        while True:
            try:
                raw = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as error:
                raw = await reader.readexactly(error.consumed)
            except asyncio.IncompleteReadError as error:
                raw = error.partial
                if not raw:
                    return
            # Of a bar that redraws itself by carriage returns only the last state is of interest.
            line = raw.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
            self.tail.append(line)
            self._log(self.name, line)
