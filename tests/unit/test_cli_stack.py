"""The stack as an operator sees it, with services that load nothing.

Each service here is a real process with a real gRPC server and health; only the models are absent.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from flashduet.errors import ConfigurationError, Unavailable
from flashduet.healthcheck import Health, probe
from flashduet_cli.ports import check_free, free_ports
from flashduet_cli.stack import Stack, StackConfig
from flashduet_cli.stack_config import Addresses, service_environment

# What takes a second on an idle machine has this long.
WAIT_S = 120.0

SERVICE = """
import asyncio, os, pathlib, signal, subprocess, sys, time

role = pathlib.Path(__file__).stem.removeprefix("fake_")
print(f"{role} loads", flush=True)
if os.environ.get("FAKE_FAILS") == role:
    print("weights are missing", flush=True)
    for number in range(20):
        print(f"FLASHDUET_TARGET_NUMBER_{number}=7", flush=True)
    sys.exit(3)
if os.environ.get("FAKE_CHILD") == role:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)

from flashduet.rpc import Server
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc, target_pb2, target_pb2_grpc


class Target(target_pb2_grpc.TargetServiceServicer):
    async def GetModelInfo(self, request, context):
        drafts = [] if os.environ.get("FAKE_REFUSES") else [target_pb2.AttachedDraft()]
        return target_pb2.TargetServiceGetModelInfoResponse(drafts=drafts)


class Gateway(gateway_pb2_grpc.GatewayServiceServicer):
    async def GetLoad(self, request, context):
        return gateway_pb2.GatewayServiceGetLoadResponse(draft_available=True)


async def main():
    server = Server([])
    target_pb2_grpc.add_TargetServiceServicer_to_server(Target(), server.grpc)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Gateway(), server.grpc)
    await server.start(os.environ[f"FLASHDUET_{role.upper()}_LISTEN"])
    if role == "gateway":
        host, _, port = os.environ["FLASHDUET_GATEWAY_HTTP_LISTEN"].rpartition(":")
        await asyncio.start_server(lambda reader, writer: writer.close(), host, int(port))
    if os.environ.get("FAKE_NEVER_SERVES") != role:
        await server.serving()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if os.environ.get("FAKE_STUBBORN") == role:
        loop.add_signal_handler(signal.SIGTERM, print, "no")
    else:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(0.1)
    print(f"{role} stopped", flush=True)


asyncio.run(main())
"""


class Log:
    """Collects what the services print and what the stack says about them."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, service: str, line: str) -> None:
        self.lines.append((service, line))

    def has(self, service: str, part: str) -> bool:
        return any(name == service and part in line for name, line in self.lines)


@pytest.fixture
def fake(tmp_path):
    """Settings for a stack of fake services; `env` is added to their environment."""
    modules = {}
    for role in ("target", "draft", "gateway"):
        (tmp_path / f"fake_{role}.py").write_text(textwrap.dedent(SERVICE))
        modules[role] = f"fake_{role}"

    def config(*, env=None, **settings) -> StackConfig:
        environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}", **(env or {})}
        defaults = {"free_ports": True, "stop_grace_s": WAIT_S, "startup_timeout_s": WAIT_S}
        return StackConfig(**(defaults | settings), modules=modules, env=environment)

    return config


async def eventually(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.05)


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def test_all_services_serve_and_all_are_gone_afterwards(fake):
    log = Log()
    async with Stack(fake(), log=log) as stack:
        pids = stack.pids
        assert set(pids) == {"target", "draft", "gateway"}
        for endpoint in (stack.endpoint, stack.target_endpoint, stack.draft_endpoint):
            assert await probe(endpoint) is Health.SERVING
    assert log.has("draft", "draft stopped")
    assert log.has("gateway", "gateway stopped")
    assert all(gone(pid) for pid in pids.values())
    order = [line for _, line in log.lines if line.endswith("stopped")]
    assert order[0] == "gateway stopped"


async def test_without_a_draft_none_is_started(fake):
    async with Stack(fake(draft=False), log=Log()) as stack:
        assert set(stack.pids) == {"target", "gateway"}


async def test_a_crashed_draft_is_started_again_on_its_port(fake):
    log = Log()
    async with Stack(fake(restart_backoff_s=0.05), log=log) as stack:
        for _ in range(2):
            first = stack.pids["draft"]
            stack.send_signal("draft", signal.SIGKILL)
            await stack.wait_exit("draft")
            await eventually(lambda old=first: stack.pids.get("draft") not in (None, old))
            await stack.wait_serving("draft")
        assert {"target", "gateway"} <= stack.pids.keys()
    assert log.has("draft", "ended by SIGKILL; starting it again in 0.05 s")
    assert log.has("draft", "starting it again in 0.1 s"), "the wait grows"


async def test_a_stopped_draft_stays_down_until_it_is_started(fake):
    async with Stack(fake(restart_backoff_s=0.01), log=Log()) as stack:
        await stack.stop_service("draft")
        await asyncio.sleep(0.3)
        assert "draft" not in stack.pids
        await stack.start_service("draft")
        await stack.wait_serving("draft")


@pytest.mark.parametrize("name", ["target", "gateway"])
async def test_the_end_of_target_or_gateway_is_told(fake, name):
    async with Stack(fake(), log=Log()) as stack:
        stack.send_signal(name, signal.SIGKILL)
        with pytest.raises(Unavailable, match=f"{name} ended by SIGKILL"):
            await asyncio.wait_for(stack.wait(), WAIT_S)


@pytest.mark.parametrize("name", ["target", "draft", "gateway"])
async def test_a_service_that_cannot_start_is_named_with_its_last_words(fake, name):
    stack = Stack(fake(env={"FAKE_FAILS": name}), log=Log())
    with pytest.raises(ConfigurationError) as caught:
        await stack.start()
    assert f"{name} ended with exit status 3" in str(caught.value)
    assert "weights are missing" in str(caught.value)
    assert "FLASHDUET_TARGET_NUMBER" not in str(caught.value), "settings are not last words"
    assert not stack.pids, "nothing may run after a failed start"


async def test_a_service_that_never_serves_is_given_up_within_the_bound(fake):
    stack = Stack(fake(env={"FAKE_NEVER_SERVES": "target"}), log=Log())
    await stack.start_service("target")
    while await probe(stack.target_endpoint) is not Health.NOT_SERVING:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    with pytest.raises(Unavailable, match="target is not serving after 2 s"):
        await stack.wait_serving("target", timeout_s=2.0)
    await stack.stop()
    assert not stack.pids


async def test_a_refused_draft_fails_the_start(fake, monkeypatch):
    monkeypatch.setattr("flashduet_cli.stack.DRAFTING_TIMEOUT_S", 1.0)
    stack = Stack(fake(env={"FAKE_REFUSES": "1"}), log=Log())
    with pytest.raises(Unavailable, match="not in use"):
        await stack.start()


async def test_a_service_that_ignores_sigterm_is_killed_with_its_children(fake):
    log = Log()
    config = fake(env={"FAKE_STUBBORN": "draft", "FAKE_CHILD": "draft"}, stop_grace_s=1.0)
    async with Stack(config, log=log) as stack:
        pid = stack.pids["draft"]
        (child,) = (int(line.split()[1]) for _, line in log.lines if line.startswith("child "))
    assert log.has("draft", "was killed")
    assert gone(pid)
    await eventually(lambda: gone(child))


async def test_an_impatient_second_ctrl_c_leaves_no_folder(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stack = Stack(fake(), log=Log())
    await stack.start()
    assert list(tmp_path.glob("flashduet-*"))
    stopping = asyncio.create_task(stack.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert not list(tmp_path.glob("flashduet-*"))
    await stack.stop()


async def test_a_taken_port_is_told_before_anything_starts(fake, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        listen = f"127.0.0.1:{holder.getsockname()[1]}"
        free = [f"127.0.0.1:{port}" for port in free_ports(3)]
        env = {
            "FLASHDUET_TARGET_LISTEN": listen,
            "FLASHDUET_DRAFT_LISTEN": free[0],
            "FLASHDUET_GATEWAY_LISTEN": free[1],
            "FLASHDUET_GATEWAY_HTTP_LISTEN": free[2],
        }
        stack = Stack(fake(free_ports=False, env=env), log=Log())
        with pytest.raises(ConfigurationError) as caught:
            await stack.start()
    assert listen in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    assert "FLASHDUET_TARGET_LISTEN" in str(caught.value)
    assert not stack.pids
    check_free(listen, "target", "FLASHDUET_TARGET_LISTEN")


OWNER = """
import asyncio, json, os, sys
from flashduet_cli.stack import Stack, StackConfig

async def main():
    settings = json.loads(sys.argv[1])
    stack = Stack(StackConfig(**settings, free_ports=True), log=lambda name, line: None)
    await stack.start()
    print(json.dumps(stack.pids), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_kill_9_of_the_owner_leaves_no_orphan(fake):
    import json

    config = fake(env={"FAKE_CHILD": "target"})
    settings = json.dumps({"modules": dict(config.modules), "env": dict(config.env)})
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, settings], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        pids = json.loads(owner.stdout.readline())
        (child,) = psutil.Process(pids["target"]).children()
        assert not any(gone(pid) for pid in pids.values())
    finally:
        owner.kill()
        owner.wait(WAIT_S)
        owner.stdout.close()
    asyncio.run(eventually(lambda: all(map(gone, [*pids.values(), child.pid]))))


def test_options_win_over_variables_and_extra_environment_over_both(monkeypatch):
    monkeypatch.setenv("FLASHDUET_TARGET_DTYPE", "float16")
    monkeypatch.setenv("FLASHDUET_TARGET_MODEL", "from-variable")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    addresses = Addresses("127.0.0.1:1", "0.0.0.0:2", "127.0.0.1:3", "127.0.0.1:4")
    given = service_environment("target", StackConfig(dtype="float32"), addresses, None)
    assert given["FLASHDUET_TARGET_DTYPE"] == "float32"
    assert given["FLASHDUET_TARGET_MODEL"] == "from-variable"
    assert given["FLASHDUET_TARGET_DRAFTS"] == "127.0.0.1:2", "a wildcard cannot be dialled"
    assert given["OMP_WAIT_POLICY"] == "ACTIVE", "what the user set stays"
    inherited = service_environment("target", StackConfig(), addresses, None)
    assert inherited["FLASHDUET_TARGET_DTYPE"] == "float16"
    extra = StackConfig(dtype="float32", env={"FLASHDUET_TARGET_DTYPE": "bfloat16"})
    given = service_environment("target", extra, addresses, None)
    assert given["FLASHDUET_TARGET_DTYPE"] == "bfloat16"
    gateway = service_environment("gateway", StackConfig(draft=False), addresses, None)
    assert gateway["FLASHDUET_GATEWAY_DRAFTS"] == ""
    assert gateway["FLASHDUET_GATEWAY_MODEL"] == "from-variable"


def test_a_long_line_without_an_end_does_not_stop_the_log(fake):
    from flashduet_cli import process

    async def run() -> list[str]:
        log = Log()
        child = process.ServiceProcess("x", "shout", {**os.environ, **fake().env}, log)
        await child.start()
        await asyncio.wait_for(child.wait(), WAIT_S)
        return [line for _, line in log.lines]

    folder = fake().env["PYTHONPATH"].split(os.pathsep)[0]
    with open(os.path.join(folder, "shout.py"), "w") as file:
        file.write(f"print('a' * {3 * process.LINE_LIMIT_BYTES})\nprint('after')\n")
    lines = asyncio.run(run())
    assert lines[-1] == "after"
    assert sum(map(len, lines[:-1])) == 3 * process.LINE_LIMIT_BYTES
