"""The target as the process that it is in reality: health, traces, signals, exit status."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashduet.healthcheck import Health, probe
from flashduet.rpc import open_channel
from flashduet.v1 import target_pb2, target_pb2_grpc
from tests.support.tiny import tiny_target
from tests.unit.target_server_support import RunningTarget, Stream, eventually
from tests.unit.target_support import prompt

START_S = 300.0


def start(model: str, **variables: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "FLASHDUET_"))}
    environment |= {
        "FLASHDUET_TARGET_MODEL": model,
        "FLASHDUET_TARGET_THREADS": "1",
        "FLASHDUET_TARGET_PREFILL_CHUNK_TOKENS": "8",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "target_service"],
        env=environment | variables,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_serves_traces_and_stops(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "tiny")
    endpoint = f"unix:{tmp_path}/target.sock"
    process = start(
        str(folder), FLASHDUET_TARGET_LISTEN=endpoint, FLASHDUET_TRACE_DIR=str(tmp_path / "traces")
    )
    try:
        seen: set[Health] = set()

        async def serving() -> bool:
            assert process.poll() is None, process.stderr and process.stderr.read()
            seen.add(await probe(endpoint))
            return Health.SERVING in seen

        await eventually(serving, START_S)
        await ask(endpoint)
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate, timeout=START_S)
    assert process.returncode == 0, log
    assert "memory plan" in log
    check_spans(tmp_path / "traces")


async def ask(endpoint: str) -> None:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    header = f"00-{trace_id}-{span_id}-01"
    async with open_channel(endpoint) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        stream = Stream(stub.Decode())
        opening = target_pb2.DecodeOpen(session_id=os.urandom(16), token_ids=prompt(20))
        await stream.call.write(target_pb2.DecodeRequest(traceparent=header, open=opening))
        stream.tokens = [*prompt(20), (await stream._read()).opened.first_token_id]
        verify = target_pb2.DecodeVerify(round=1, base=20, token_ids=[1, 2])
        await stream.call.write(target_pb2.DecodeRequest(traceparent=header, verify=verify))
        assert (await stream._read()).verified.round == 1
        # A round without a trace leaves no span.
        untraced = target_pb2.DecodeVerify(round=2, base=21, token_ids=[])
        await stream.call.write(target_pb2.DecodeRequest(verify=untraced))
        await stream._read()
        await stream.close()
        load = await RunningTarget(None, channel).load()  # type: ignore[arg-type]
        assert (load.sessions, load.kv_tokens, load.steps) == (0, 0, 5)


def check_spans(folder: Path) -> None:
    (file,) = folder.glob("target-*.jsonl")
    spans = [
        span
        for line in file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert len({span["traceId"] for span in spans}) == 1
    roots = {span["spanId"]: span["name"] for span in spans if span["name"] in ROOTS}
    assert sorted(roots.values()) == sorted(ROOTS)
    children: dict[str, list[str]] = {name: [] for name in ROOTS}
    for span in spans:
        if span["parentSpanId"] in roots:
            children[roots[span["parentSpanId"]]].append(span["name"])
    phases = {"target.queue", "target.forward", "target.sample", "target.publish"}
    assert set(children["target.prefill"]) == set(children["target.verify"]) == phases
    assert children["target.prefill"].count("target.forward") == 3
    assert len(children["target.verify"]) == 4
    assert len(spans) == 2 + len(children["target.prefill"]) + 4


ROOTS = ["target.prefill", "target.verify"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FLASHDUET_TARGET_MODEL": "/nowhere"}, "no such folder"),
        ({"FLASHDUET_TARGET_LISTEN": "192.0.2.1:1"}, "cannot listen"),
    ],
)
def test_what_cannot_work_ends_with_the_reason(variables: dict[str, str], words: str) -> None:
    process = start("/nowhere", **{"FLASHDUET_TARGET_LISTEN": "127.0.0.1:0"} | variables)
    _, log = process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert words in log
    assert "Traceback" not in log
