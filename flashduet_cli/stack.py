"""A local stack: target, draft and gateway as child processes, from start to the last exit.

    async with Stack(StackConfig(free_ports=True)) as stack:
        async with AsyncClient(stack.endpoint) as client:
            ...

Used by `flashduet up`, `generate` and `check`, and by the integration tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from flashduet.client.api_key import call_metadata
from flashduet.errors import ConfigurationError, Unavailable
from flashduet.healthcheck import Health, probe
from flashduet.rpc import open_channel
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc, target_pb2, target_pb2_grpc
from flashduet_cli.ports import check_free
from flashduet_cli.process import LogSink, ServiceProcess
from flashduet_cli.stack_config import (
    Addresses,
    StackConfig,
    choose_addresses,
    listen_variable,
    reachable,
    service_environment,
)

__all__ = ["Stack", "StackConfig"]

POLL_S = 0.1
# A draft that ran this long before it crashed is restarted without the grown wait.
STABLE_S = 60.0
DRAFTING_TIMEOUT_S = 20.0
_SETTING = re.compile(r"FLASHDUET_\w+=")
HTTP_TIMEOUT_S = 20.0

# Called when something of note happens to a service: its name, and what in a few words.
EventSink = Callable[[str, str], None]


def print_log(service: str, line: str) -> None:
    """The default sink: plain prefixed lines on stderr."""
    print(f"{service:<7} | {line}", file=sys.stderr, flush=True)


class Stack:
    """Owns the children, their addresses and, with free ports, their socket directory.

    A crashed draft is started again on its port (a draft is never load-bearing); the end of the
    target or the gateway ends the stack, and `wait()` says so.
    """

    def __init__(
        self, config: StackConfig, log: LogSink = print_log, event: EventSink | None = None
    ) -> None:
        self.config = config
        self.addresses: Addresses = choose_addresses(config)
        self._log = log
        self._event = event or log
        self._processes: dict[str, ServiceProcess] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._own_socket_dir: Path | None = None
        self._failed: asyncio.Future[str] | None = None
        self._served: set[str] = set()
        self._stopping = False

    @property
    def endpoint(self) -> str:
        """The gateway's gRPC address."""
        return reachable(self.addresses.gateway)

    @property
    def target_endpoint(self) -> str:
        return reachable(self.addresses.target)

    @property
    def draft_endpoint(self) -> str:
        return reachable(self.addresses.draft)

    @property
    def http_url(self) -> str:
        """Base of the OpenAI API, without /v1."""
        return f"http://{reachable(self.addresses.http)}"

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the services that run now."""
        return {
            name: process.pid
            for name, process in self._processes.items()
            if process.pid is not None and process.returncode is None
        }

    async def start(self) -> None:
        """Start all services and wait until the stack answers, drafted if it has a draft.

        Raises:
            ConfigurationError: an address is taken, or a service ended; with its last lines.
            Unavailable: a service did not come up in time.
        """
        self._failed = asyncio.get_running_loop().create_future()
        self._check_ports()
        self._make_socket_dir()
        try:
            for name in self.config.services:
                await self.start_service(name)
            for name in self.config.services:
                await self.wait_serving(name)
            await self._wait_http()
            if self.config.draft:
                await self.wait_drafting()
        except BaseException:
            await self.stop()
            raise

    async def start_service(self, name: str) -> None:
        """Start one service that is not running."""
        if name in self.pids:
            raise RuntimeError(f"{name} is running already")
        environment = service_environment(
            name, self.config, self.addresses, self._own_socket_dir or self.config.socket_dir
        )
        process = ServiceProcess(name, self.config.modules[name], environment, self._log)
        await process.start()
        self._processes[name] = process
        if name not in self._keepers:
            self._keepers[name] = asyncio.create_task(self._keep(name), name=f"keep-{name}")

    async def stop_service(self, name: str) -> None:
        """Stop one service for good, as an operator would (SIGTERM); `start_service` undoes it."""
        await self._drop_keeper(name)
        if process := self._processes.get(name):
            await process.stop(self.config.stop_grace_s)

    def send_signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one service's process, which is then treated as it deserves."""
        self._processes[name].send_signal(number)

    async def wait_exit(self, name: str, timeout_s: float = 30.0) -> int:
        """Exit status of the process that runs as `name` now."""
        return await asyncio.wait_for(self._processes[name].wait(), timeout_s)

    async def wait_serving(self, name: str, timeout_s: float | None = None) -> None:
        """Wait until a service's health is SERVING.

        The bound grows with the machine's load, because loading a model is a fixed amount of
        work: `startup_timeout_s` on an idle machine, at most four times that.

        Raises:
            ConfigurationError: the process ended first.
            Unavailable: the bound passed.
        """
        bound_s = self.config.startup_timeout_s * _load_factor() if timeout_s is None else timeout_s
        endpoint, started = reachable(self.addresses.of(name)), time.monotonic()
        health = Health.UNREACHABLE
        while time.monotonic() - started < bound_s:
            process = self._processes[name]
            if process.returncode is not None and not self._restarts(name):
                raise ConfigurationError(_ended(process))
            health = await probe(endpoint, timeout_s=2.0)
            if health is Health.SERVING:
                self._served.add(name)
                took_s = time.monotonic() - process.started_at
                self._event(name, f"serving on {endpoint} after {took_s:.1f} s")
                return
            await asyncio.sleep(POLL_S)
        raise Unavailable(
            f"{name} is {health.value} after {bound_s:.0f} s\n{_last_lines(self._processes[name])}"
        )

    async def wait_drafting(self, timeout_s: float | None = None) -> None:
        """Wait until the gateway drafts: the target has attached the draft, and both are known.

        The bound grows with the machine's load here too, from DRAFTING_TIMEOUT_S.

        Raises:
            Unavailable: it does not within the bound; the services' log says why.
        """
        bound_s = DRAFTING_TIMEOUT_S * _load_factor() if timeout_s is None else timeout_s
        deadline = time.monotonic() + bound_s
        async with (
            open_channel(self.target_endpoint) as to_target,
            open_channel(self.endpoint) as to_gateway,
        ):
            target = target_pb2_grpc.TargetServiceStub(to_target)
            gateway = gateway_pb2_grpc.GatewayServiceStub(to_gateway)
            while time.monotonic() < deadline:
                with contextlib.suppress(grpc.RpcError):
                    info = await target.GetModelInfo(
                        target_pb2.TargetServiceGetModelInfoRequest(), timeout=2.0
                    )
                    load = await gateway.GetLoad(
                        gateway_pb2.GatewayServiceGetLoadRequest(),
                        timeout=2.0,
                        metadata=call_metadata(),
                    )
                    if info.drafts and load.draft_available:
                        return
                await asyncio.sleep(POLL_S)
        raise Unavailable(
            f"the draft serves, but is not in use {bound_s:.0f} s later (refused by the target's "
            f"handshake?)\n{_last_lines(self._processes['target'])}"
        )

    async def wait(self) -> None:
        """Wait until the stack fails; it does not return otherwise.

        Raises:
            Unavailable: the target or the gateway ended by itself.
        """
        if self._failed is None:
            raise RuntimeError("the stack was not started")
        raise Unavailable(await asyncio.shield(self._failed))

    async def stop(self) -> None:
        """Stop everything, the gateway first; nothing of it runs afterwards. Never raises."""
        self._stopping = True
        try:
            for name in list(self._keepers):
                await self._drop_keeper(name)
            if gateway := self._processes.get("gateway"):
                await gateway.stop(self.config.stop_grace_s)
            rest = [process for name, process in self._processes.items() if name != "gateway"]
            await asyncio.gather(*(process.stop(self.config.stop_grace_s) for process in rest))
        finally:
            # Also when a second Ctrl-C ends the waiting.
            if self._own_socket_dir is not None:
                shutil.rmtree(self._own_socket_dir, ignore_errors=True)
                self._own_socket_dir = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _keep(self, name: str) -> None:
        """Follow one service's ends until the stack stops."""
        backoff_s = self.config.restart_backoff_s
        while True:
            started, process = time.monotonic(), self._processes[name]
            await process.wait()
            if self._stopping:
                return
            if not self._restarts(name):
                if self._failed is not None and not self._failed.done() and name != "draft":
                    self._failed.set_result(_ended(process))
                return
            if time.monotonic() - started > STABLE_S:
                backoff_s = self.config.restart_backoff_s
            self._event(name, f"{_status(process)}; starting it again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, self.config.restart_backoff_max_s)
            await self.start_service(name)

    async def _wait_http(self) -> None:
        host, _, port = reachable(self.addresses.http).rpartition(":")
        bound_s = HTTP_TIMEOUT_S * _load_factor()
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                return
            await asyncio.sleep(POLL_S)
        raise Unavailable(
            f"the gateway's HTTP side does not answer on {self.addresses.http} after "
            f"{bound_s:.0f} s\n{_last_lines(self._processes['gateway'])}"
        )

    def _restarts(self, name: str) -> bool:
        """Whether a process that ended is started again: a draft that has worked before.

        One that never came up is misconfigured, and trying again would only hide it.
        """
        wanted = name == "draft" and self.config.restart_draft and name in self._served
        return wanted and not self._stopping

    async def _drop_keeper(self, name: str) -> None:
        if keeper := self._keepers.pop(name, None):
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    def _check_ports(self) -> None:
        if self.config.free_ports:
            return
        for name in self.config.services:
            check_free(self.addresses.of(name), name, listen_variable(name))
        check_free(self.addresses.http, "gateway (HTTP)", "FLASHDUET_GATEWAY_HTTP_LISTEN")

    def _make_socket_dir(self) -> None:
        if self.config.free_ports and self.config.socket_dir is None:
            self._own_socket_dir = Path(tempfile.mkdtemp(prefix="flashduet-"))


def _load_factor() -> float:
    cores = os.cpu_count() or 1
    return min(4.0, max(1.0, os.getloadavg()[0] / cores))


def _status(process: ServiceProcess) -> str:
    code = process.returncode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _ended(process: ServiceProcess) -> str:
    return f"{process.name} {_status(process)}\n{_last_lines(process)}"


def _last_lines(process: ServiceProcess) -> str:
    # The settings that a service prints at its start would push out what went wrong.
    lines = [line for line in process.tail if not _SETTING.match(line)][-12:]
    return "\n".join(f"  {process.name} | {line}" for line in lines) or "  (it printed nothing)"
