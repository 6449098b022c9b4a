"""A whole stack of real processes over a tiny random pair, driven from synchronous tests."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from flashduet.client import Client
from flashduet.healthcheck import Health, probe
from flashduet.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from flashduet_cli.ports import free_ports
from flashduet_cli.process import ServiceProcess
from flashduet_cli.stack import Stack, StackConfig
from flashduet_cli.stack_config import listen_variable, service_environment

START_TIMEOUT_S = 600
# What takes a second on an idle machine has this long: a bound tells a hang, not a slow machine.
WAIT_S = 120
CALL_S = 30
# A second is what is promised. More would hide what only a draft's lease (30 s) frees in the end.
FREED_WITHIN_S = 10

# A draft is given the time that a busy machine needs, where a test is not about that time.
PATIENCE = {
    "FLASHDUET_GATEWAY_DRAFT_BUDGET_FLOOR_MS": "20000",
    "FLASHDUET_GATEWAY_DRAFT_BUDGET_CEILING_MS": "20000",
}


def wait_until(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Poll until `condition()`; an AssertionError that says what was waited for otherwise."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        time.sleep(0.1)


class Pair:
    """Owns one stack and the event loop that follows its processes."""

    def __init__(self, target: Path, drafter: Path, trace_dir: Path, **environment: str) -> None:
        self.target_folder, self.drafter_folder, self.trace_dir = target, drafter, trace_dir
        self.logs: list[str] = []
        self._more: list[ServiceProcess] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.environment = {
            "FLASHDUET_TRACE_DIR": str(trace_dir),
            "FLASHDUET_TARGET_PREFILL_CHUNK_TOKENS": "32",
            **environment,
        }
        config = StackConfig(
            model=str(target),
            drafter=str(drafter),
            dtype="float32",
            threads=1,
            free_ports=True,
            env=self.environment,
        )
        self._stack = self._run(self._make(config))

    async def _make(self, config: StackConfig) -> Stack:
        stack = Stack(config, log=lambda name, line: self.logs.append(f"{name} | {line}"))
        await stack.start()
        return stack

    @property
    def gateway(self) -> str:
        return self._stack.endpoint

    @property
    def http(self) -> str:
        return self._stack.http_url

    @property
    def draft(self) -> str:
        return self._stack.draft_endpoint

    @property
    def target(self) -> str:
        return self._stack.target_endpoint

    def pids(self) -> dict[str, int]:
        """Processes that run, by service."""
        return self._stack.pids

    def ended(self) -> dict[str, int]:
        """Exit statuses of processes that run no more, by service; a signal's is negative."""
        ended = {name: one.returncode for name, one in self._stack._processes.items()}
        return {name: code for name, code in ended.items() if code is not None}

    def pid(self, name: str) -> int:
        return self._stack.pids[name]

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def restart(self, name: str, **changes: Any) -> None:
        """Kill a service if it runs, and start it again on its port, with changed choices."""

        async def run() -> None:
            await self._stack.stop_service(name)
            self._stack.config = replace(self._stack.config, **changes)
            await self._stack.start_service(name)
            await self._stack.wait_serving(name)

        self._run(run())

    def add(self, name: str, service: str, **environment: str) -> str:
        """Start one more process of a service, on a free port; its address."""

        async def run() -> str:
            (port, http_port), stack = free_ports(2), self._stack
            address = environment.pop("LISTEN", f"127.0.0.1:{port}")
            given = service_environment(
                service, stack.config, stack.addresses, stack._own_socket_dir
            ) | {
                listen_variable(service): address,
                "FLASHDUET_GATEWAY_HTTP_LISTEN": f"127.0.0.1:{http_port}",
                **environment,
            }
            process = ServiceProcess(name, stack.config.modules[service], given, stack._log)
            await process.start()
            self._more.append(process)
            deadline = time.monotonic() + START_TIMEOUT_S
            while await probe(address, timeout_s=2.0) is not Health.SERVING:
                assert process.returncode is None, list(process.tail)
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            return address

        return self._run(run())

    def wait_drafting(self) -> None:
        self._run(self._stack.wait_drafting(WAIT_S))

    def descriptors(self) -> dict[str, int]:
        """Open file descriptors of each process that runs."""
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self._stack.pids.items()}

    def target_load(self) -> target_pb2.TargetServiceGetLoadResponse:
        with grpc.insecure_channel(self._stack.target_endpoint) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            return stub.GetLoad(target_pb2.TargetServiceGetLoadRequest(), timeout=CALL_S)

    def draft_load(self, endpoint: str = "") -> draft_pb2.DraftServiceGetLoadResponse:
        """Of the stack's draft, or of the one at `endpoint`."""
        with grpc.insecure_channel(endpoint or self.draft) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            return stub.GetLoad(draft_pb2.DraftServiceGetLoadRequest(), timeout=CALL_S)

    def target_info(self) -> target_pb2.TargetServiceGetModelInfoResponse:
        with grpc.insecure_channel(self.target) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            return stub.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest(), timeout=CALL_S)

    def draft_info(self) -> draft_pb2.DraftServiceGetModelInfoResponse:
        with grpc.insecure_channel(self.draft) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            return stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=CALL_S)

    def left_over(self, without: frozenset[str] = frozenset()) -> dict[str, int]:
        """What the running services still hold; empty when nothing is left."""
        held: dict[str, int] = {}
        if "target" not in without:
            load = self.target_load()
            held |= {
                "target sessions": load.sessions,
                "target kv tokens": load.kv_tokens,
                "target queued items": load.queued_items,
                "ring records": load.ring_records,
            }
        if "draft" not in without:
            drafted = self.draft_load()
            held |= {
                "draft sessions": drafted.sessions,
                "draft context rows": drafted.context_rows,
                "draft context blocks": drafted.context_blocks - drafted.free_context_blocks,
                "draft queued proposals": drafted.queued_proposals,
            }
        if "gateway" not in without:
            with Client(self.gateway) as client:
                held["gateway requests"] = client.load().active_requests
        return {name: count for name, count in held.items() if count}

    def assert_nothing_left(
        self, within_s: float = FREED_WITHIN_S, without: frozenset[str] | set[str] = frozenset()
    ) -> None:
        """The services free everything within the bound."""
        deadline = time.monotonic() + within_s
        while held := self._try_left_over(frozenset(without)):
            assert time.monotonic() < deadline, f"still held after {within_s:g} s: {held}"
            time.sleep(0.1)

    def assert_closed(
        self, before: dict[str, int], more: int = 4, names: Iterable[str] = ()
    ) -> None:
        """The services (those of `names`, or all) come back to the descriptors of `before`.

        `more`: how many a process may have opened for good, say a connection to a new peer.
        """

        def closed() -> bool:
            now = self.descriptors()
            return all(now[name] <= before[name] + more for name in names or before)

        wait_until(closed, "descriptors to be closed")

    def stop(self) -> None:
        for process in self._more:
            self._run(process.stop(CALL_S))
        self._run(self._stack.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)

    def _try_left_over(self, without: frozenset[str]) -> dict[str, int]:
        try:
            return self.left_over(without)
        except grpc.RpcError as error:
            return {f"a service that does not answer ({error.code().name})": 1}

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)
