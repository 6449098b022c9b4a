"""The gateway as a process: light, honest about its readiness, and gone when told to go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from flashduet import rpc
from flashduet.healthcheck import Health, probe
from flashduet.models import tokenizer_hash
from flashduet.v1.gateway_pb2_grpc import GatewayServiceStub
from flashduet_cli.ports import free_ports
from tests.unit.toy_draft import ToyDraft, serve_draft
from tests.unit.toy_model import ids_of, plain_answer, tokenizer_folder
from tests.unit.toy_stack import GeneratedAnswer, ask, until
from tests.unit.toy_target import ToyTarget, serve_target

# Loading a tokenizer in a process of its own, on a machine that may be busy.
START_S = 300


@asynccontextmanager
async def gateway(**variables: object) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {f"FLASHDUET_GATEWAY_{name.upper()}": str(v) for name, v in variables.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def wait_for(endpoint: str, wanted: Health) -> None:
    async with asyncio.timeout(START_S):
        while await probe(endpoint) is not wanted:  # noqa: ASYNC110 (asked over the wire)
            await asyncio.sleep(0.05)


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


async def test_the_life_of_the_process(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    target = ToyTarget(tokenizer_hash=tokenizer_hash(folder))
    draft = ToyDraft(target)
    target.drafts.append(draft)
    port, target_port, http_port = free_ports(3)
    draft_server = await serve_draft(draft)
    endpoint = f"127.0.0.1:{port}"
    async with gateway(
        listen=endpoint,
        http_listen=f"127.0.0.1:{http_port}",
        targets=f"127.0.0.1:{target_port}",
        drafts=f"127.0.0.1:{draft_server.port}",
        model=folder,
        poll_s=0.05,
    ) as process:
        url = f"http://127.0.0.1:{http_port}"
        await wait_for(endpoint, Health.NOT_SERVING)
        async with httpx.AsyncClient(base_url=url, timeout=START_S) as http:
            assert (await http.get("/ready")).status_code == 503

            target_server = await serve_target(target, f"127.0.0.1:{target_port}")
            await wait_for(endpoint, Health.SERVING)
            assert (await http.get("/ready")).status_code == 200

        async with rpc.open_channel(endpoint) as channel:
            answer = GeneratedAnswer()
            async for response in GatewayServiceStub(channel).Generate(ask(ids_of("hello"))):
                answer.add(response)
        assert answer.token_ids == plain_answer(ids_of("hello"), 40)

        assert not maps_torch(process.pid)

        await target_server.stop(0)
        await wait_for(endpoint, Health.NOT_SERVING)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START_S) == 0
    await draft_server.stop(0)


async def test_a_stop_cuts_off_what_outlasts_the_grace(tmp_path: Path) -> None:
    target = ToyTarget(verify_delay_s=30)
    target_server, (port, http_port) = await serve_target(target), free_ports(2)
    async with gateway(
        listen=f"127.0.0.1:{port}",
        http_listen=f"127.0.0.1:{http_port}",
        targets=f"127.0.0.1:{target_server.port}",
        drafts="",
        model=tokenizer_folder(tmp_path),
        poll_s=0.05,
        shutdown_grace_s=0.5,
    ) as process:
        await wait_for(f"127.0.0.1:{port}", Health.SERVING)
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}") as http,
            rpc.open_channel(f"127.0.0.1:{port}") as channel,
        ):
            chat = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "stream": True}
            by_http = asyncio.create_task(http.post("/v1/chat/completions", json=chat))
            by_grpc = asyncio.create_task(
                GatewayServiceStub(channel).Generate(ask(ids_of("hello"))).read()
            )
            await until(lambda: len(target.verified_lengths) == 2)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), START_S) == 0
            await asyncio.gather(by_http, by_grpc, return_exceptions=True)
        await until(lambda: not target.sessions, what="sessions freed on the target")
    await target_server.stop(0)


def test_no_part_of_the_gateway_imports_torch(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    check = (
        "import sys, json, pkgutil, importlib, pathlib, gateway\n"
        "sys.modules['torch'] = None\n"
        "for module in pkgutil.iter_modules(gateway.__path__):\n"
        "    importlib.import_module('gateway.' + module.name)\n"
        f"gateway.tokenization.Tokenizer(pathlib.Path({str(folder)!r}))\n"
        "print(json.dumps(sorted(m for m in sys.modules if m.split('.')[0] == 'torch')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["torch"], "only the marker that keeps it out"


def test_importing_the_gateway_alone_brings_neither_torch_nor_transformers() -> None:
    check = (
        "import sys, pkgutil, importlib, gateway\n"
        "for module in pkgutil.iter_modules(gateway.__path__):\n"
        "    importlib.import_module('gateway.' + module.name)\n"
        "print({'torch', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=START_S
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"max_requests": 0}, "FLASHDUET_GATEWAY_MAX_REQUESTS"),
        ({"targets": " , "}, "FLASHDUET_GATEWAY_TARGETS"),
        ({"speculation": "maybe"}, "FLASHDUET_GATEWAY_SPECULATION"),
        ({"model": "no such model!"}, "FLASHDUET_GATEWAY_MODEL"),
        ({"http_listen": "127.0.0.1:notaport"}, "FLASHDUET_GATEWAY_HTTP_LISTEN"),
        ({"api_keys": " , "}, "FLASHDUET_GATEWAY_API_KEYS"),
        ({"api_keys_file": "none/at/all"}, "FLASHDUET_GATEWAY_API_KEYS_FILE"),
    ],
)
async def test_a_configuration_that_cannot_work_ends_the_start_with_the_variable(
    variables: dict[str, object], named: str
) -> None:
    listen = {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0", "drafts": ""}
    async with gateway(**{**listen, **variables}) as process:
        _, errors = await asyncio.wait_for(process.communicate(), START_S)
        assert process.returncode == 2
        assert named in errors.decode().strip().splitlines()[-1]
