"""`python -m draft_service` as a process: it serves, ends when told, and says what is wrong."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashduet import rpc
from flashduet.v1 import draft_pb2 as dp
from flashduet.v1 import draft_pb2_grpc

SECONDS = 300.0


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose name leaves room for a Unix socket's: pytest's own are too long."""
    with tempfile.TemporaryDirectory(prefix="fd") as folder:
        yield Path(folder)


def start(models: Path, sockets: Path, **changes: str) -> subprocess.Popen[str]:
    settings = {
        "LISTEN": "127.0.0.1:0",
        "MODEL": str(models / "drafter"),
        "TARGET_MODEL": str(models / "target"),
        "SOCKET_DIR": str(sockets),
        "DEVICE": "cpu",
        "THREADS": "1",
        "SHUTDOWN_GRACE_S": "0.5",
    }
    environment = {f"FLASHDUET_DRAFT_{name}": value for name, value in (settings | changes).items()}
    return subprocess.Popen(
        [sys.executable, "-m", "draft_service"],
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of stderr that matches; fails when the process ends before."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError("".join(seen))


async def test_it_serves_until_it_is_told_to_end(tiny_models: Path, sockets: Path) -> None:
    process = start(tiny_models, sockets)
    try:
        line = await asyncio.to_thread(
            wait_for_line, process, r"serving drafter drafter on port (\d+)"
        )
        assert len(os.listdir(sockets)) == 1
        async with rpc.open_channel(f"127.0.0.1:{line[1]}") as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            load = await stub.GetLoad(dp.DraftServiceGetLoadRequest(), timeout=60)
            assert (load.sessions, load.max_sessions) == (0, 256)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert os.listdir(sockets) == []


def test_a_wrong_setting_ends_it_with_the_fix(tiny_models: Path, sockets: Path) -> None:
    process = start(tiny_models, sockets, LEASE_S="-1")
    try:
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    assert "FLASHDUET_DRAFT_LEASE_S" in errors
    assert "Traceback" not in errors
