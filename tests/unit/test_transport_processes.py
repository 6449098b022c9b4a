"""Two real processes, one of which is killed: nothing is torn, nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from flashduet.errors import TransportError
from flashduet.transport import loans
from flashduet.transport.negotiation import Receivers, open_sender
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2
from tests.unit.transport_peer import ROWS, SESSION, WIDTH, chunk, options

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60


class Peer:
    """A freshly exec'd process with a line protocol."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), TIMEOUT_S)).decode().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await asyncio.wait_for(self.process.wait(), TIMEOUT_S)


@asynccontextmanager
async def peer(role: str, folder: Path, instance: bytes) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.transport_peer", role, str(folder), instance.hex()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    child = Peer(process)
    try:
        yield child
    finally:
        await child.kill()


def held() -> tuple[int, int]:
    """This process's descriptors of rings, and its mappings of rings."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    maps = Path("/proc/self/maps").read_text()
    return sum("flashduet-ring" in link for link in links), maps.count("flashduet-ring")


def payload_of(line: str) -> pb.TensorPayload:
    return pb.TensorPayload.FromString(bytes.fromhex(line))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "meet"


async def test_a_killed_target_leaves_whole_chunks_and_a_new_one_can_attach(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loans, "LEAST_LENT_BYTES", 1)
    instance = secrets.token_bytes(16)
    draft = Receivers(instance, options(str(folder)))
    await draft.start()
    for _ in range(2):
        async with peer("target", folder, instance) as target:
            attach = draft_pb2.IngestAttach.FromString(bytes.fromhex(await target.line()))
            receiver = await draft.open_receiver(attach)
            lines = []
            for sequence in range(40):
                lines.append(await target.line())
                taken = receiver.take(
                    SESSION, 0, sequence * ROWS, ROWS, WIDTH, payload_of(lines[-1])
                )
                assert bool((taken == chunk(sequence)).all())
                target.tell(str(sequence))
            unread = await target.line()
            lent = receiver.lend(40, SESSION, 0, 40 * ROWS, ROWS, WIDTH, payload_of(unread))
            await target.kill()
            # What it had published before it died is still there and whole.
            taken = receiver.take(SESSION, 0, 40 * ROWS, ROWS, WIDTH, payload_of(unread))
            assert bool((taken == chunk(40)).all())
            with pytest.raises(TransportError):
                receiver.take(SESSION, 0, 0, ROWS, WIDTH, payload_of(lines[0]))
            assert held() == (1, 1)
            receiver.close()
        assert draft.rings == 0
        # What was lent lasts as long as somebody looks at it.
        assert held() == (1, 1)
        assert lent is not None
        assert lent.intact()
        assert torch.equal(lent.features, chunk(40))
        del lent
        assert held() == (0, 0)
    await draft.close()
    assert os.listdir(folder) == []


async def test_a_killed_draft_costs_the_target_nothing_but_its_ring(folder: Path) -> None:
    instance = secrets.token_bytes(16)
    async with peer("draft", folder, instance) as draft:
        assert await draft.line() == "listening"
        sender, attach = await open_sender([pb.TRANSPORT_MEMFD], instance, options(str(folder)))
        draft.tell(attach.SerializeToString().hex())
        for sequence in range(20):
            payload = sender.put(sequence, SESSION, 0, sequence * ROWS, chunk(sequence))
            assert payload is not None
            draft.tell(payload.SerializeToString().hex())
            assert await draft.line() == "True"
            sender.release(sequence)
        await draft.kill()
        assert held() == (1, 1)
        # The engine goes on writing until the stream's end is noticed; it is never stopped.
        results = [sender.put(n, SESSION, 0, 0, chunk(n)) for n in range(20, 60)]
        assert results[0] is not None
        assert results[-1] is None
        sender.close()
        assert held() == (0, 0)
    assert os.listdir(folder) == [f"{instance.hex()}.sock"]
    successor = Receivers(secrets.token_bytes(16), options(str(folder)))
    await successor.start()
    assert not (folder / f"{instance.hex()}.sock").exists()
    await successor.close()
    with pytest.raises(Exception, match="not reachable"):
        await open_sender([pb.TRANSPORT_MEMFD], instance, options(str(folder)))
