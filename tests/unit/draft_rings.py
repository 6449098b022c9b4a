"""A draft service that reads rings, and targets that hand theirs over."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from flashduet.transport.base import FeatureSender
from flashduet.transport.negotiation import open_sender
from flashduet.transport.options import TransportOptions
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from tests.unit.draft_peers import TargetPeer
from tests.unit.draft_running import Running, served


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose name leaves room for a Unix socket's: pytest's own are too long."""
    with tempfile.TemporaryDirectory(prefix="fd") as folder:
        yield Path(folder)


@pytest.fixture
async def running(tiny_models: Path, tmp_path: Path, sockets: Path) -> AsyncIterator[Running]:
    async with served(tiny_models, tmp_path, transports="memfd", socket_dir=sockets) as started:
        yield started


async def hand_ring_over(
    target: TargetPeer,
    sockets: Path,
    offers: Sequence[pb.Transport] = (pb.TRANSPORT_MEMFD,),
    capabilities: Sequence[str] = (),
) -> FeatureSender:
    """Greet the draft and attach a ring; its sender."""
    await target.send(target.hello(offers=offers, capabilities=capabilities))
    welcome = (await target.receive()).welcome
    assert list(welcome.accepted) == [pb.TRANSPORT_MEMFD]
    options = TransportOptions("memfd", "cpu", sockets, ring_bytes=1 << 20)
    sender, attach = await open_sender(welcome.accepted, welcome.draft_instance_id, options)
    await target.send(dp.IngestRequest(attach=attach))
    assert (await target.receive()).attached.transport == pb.TRANSPORT_MEMFD
    return sender
