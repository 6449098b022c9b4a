"""A child interpreter that measures in process what the services are compared with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from types import TracebackType
from typing import Any, Self

from flashduet.errors import ConfigurationError
from flashduet.idle_threads import WAITING

# Loading, compiling and a batch of answers all take less.
TIMEOUT_S = 900.0
_LINE_LIMIT_BYTES = 16 << 20


class Probe:
    """Owns one `engine_probes` process; requests are answered one at a time.

    Args:
        name: of the module.
        like_service: give it the environment of a service, in which waiting threads hardly spin;
            otherwise it is a process as a user would start it.
    """

    def __init__(self, name: str, *, like_service: bool = True, threads: int | None = None) -> None:
        self._name = name
        self._environment = dict(os.environ)
        if like_service:
            self._environment |= WAITING
        if threads is not None:
            self._environment["OMP_NUM_THREADS"] = str(threads)
        self._environment |= {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=12)
        self._pump: asyncio.Task[None] | None = None

    @property
    def returncode(self) -> int | None:
        """Exit status of the process; None while it runs."""
        return self._process.returncode if self._process else None

    async def ask(self, do: str, **arguments: object) -> Any:
        """The result of one of the probe's commands.

        Raises:
            ConfigurationError: it failed, ended, or did not answer in time; with what it said.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise self._failed(f"{do}: no answer in {TIMEOUT_S:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise self._failed(f"{do}: it ended")
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(f"{do}: {answer['error']}")
        return answer["result"]

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"engine_probes.{self._name}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=_LINE_LIMIT_BYTES,
        )
        self._pump = asyncio.create_task(self._keep_stderr())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None or self._pump is None:
            return
        if process.stdin is not None:
            process.stdin.close()  # it reads its end and goes
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def _keep_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._stderr.append(line.decode(errors="replace").rstrip())

    def _failed(self, what: str) -> ConfigurationError:
        said = "\n".join(f"  {self._name} | {line}" for line in self._stderr)
        return ConfigurationError(f"the probe {self._name}, {what}\n{said}".rstrip())
