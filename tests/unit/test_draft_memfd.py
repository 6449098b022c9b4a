"""The draft's end of a memfd ring: read, acknowledged, refused, given back."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from draft_service.service import DraftService
from flashduet import models, rpc
from flashduet.transport.negotiation import open_sender
from flashduet.transport.options import TransportOptions
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from tests.unit.draft_peers import TargetPeer
from tests.unit.draft_running import Running, settings_for
from tests.unit.drafting import engine_of


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose name leaves room for a Unix socket's: pytest's own are too long."""
    with tempfile.TemporaryDirectory(prefix="fd") as folder:
        yield Path(folder)


@pytest.fixture
async def running(tiny_models: Path, tmp_path: Path, sockets: Path) -> AsyncIterator[Running]:
    settings = settings_for(
        tmp_path,
        model=str(tiny_models / "drafter"),
        target_model=str(tiny_models / "target"),
        transports="memfd",
        socket_dir=sockets,
    )
    service = DraftService(settings)
    await service.start()
    channel = rpc.open_channel(f"127.0.0.1:{service.port}")
    facts = models.model_facts(tiny_models / "target", "tiny", pb.DATA_TYPE_FLOAT32)
    reference = engine_of(tiny_models / "drafter", tiny_models / "target")
    yield Running(service, channel, facts, reference)
    await channel.close()
    await service.stop()


async def test_a_ring_is_read_acknowledged_and_given_back(running: Running, sockets: Path) -> None:
    target, gateway = TargetPeer(running.channel, running.facts), running.gateway()
    await target.send(target.hello(offers=[pb.TRANSPORT_MEMFD, pb.TRANSPORT_INLINE]))
    welcome = (await target.receive()).welcome
    assert list(welcome.accepted) == [pb.TRANSPORT_MEMFD]
    options = TransportOptions("memfd", "cpu", sockets, ring_bytes=1 << 20)
    sender, attach = await open_sender(welcome.accepted, welcome.draft_instance_id, options)
    await target.send(dp.IngestRequest(attach=attach))
    assert (await target.receive()).attached.transport == pb.TRANSPORT_MEMFD
    assert (await running.load()).rings == 1
    target.use(sender)
    session = os.urandom(16)
    await gateway.open(session, target)
    features = running.features(40)
    for start in range(0, 40, 10):
        ack = await target.chunk(session, start, features[start : start + 10])
        assert ack.ack.context_end == start + 10
    answer = await gateway.propose(session, 41)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)
    # A descriptor that was good once is not good twice.
    stale = sender.put(99, session, 0, 40, features[:4])
    assert stale is not None
    stale.ring.generation -= 1
    refused = await target.chunk(session, 40, features[:4], features=stale)
    assert dp.NackReason.Name(refused.nack.reason) == "NACK_REASON_STALE_GENERATION"
    stale.ring.offset = 1 << 30
    refused = await target.chunk(session, 40, features[:4], features=stale)
    assert dp.NackReason.Name(refused.nack.reason) == "NACK_REASON_OUT_OF_RANGE"
    await target.end()
    await gateway.end()
    sender.close()
    await running.emptied()


async def test_no_descriptor_is_left_after_many_streams(running: Running, sockets: Path) -> None:

    async def one_stream() -> None:
        target = TargetPeer(running.channel, running.facts)
        await target.send(target.hello(offers=[pb.TRANSPORT_MEMFD]))
        welcome = (await target.receive()).welcome
        options = TransportOptions("memfd", "cpu", sockets, ring_bytes=1 << 20)
        sender, attach = await open_sender(welcome.accepted, welcome.draft_instance_id, options)
        await target.send(dp.IngestRequest(attach=attach))
        await target.receive()
        await target.end()
        sender.close()
        await running.emptied()

    await one_stream()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        await one_stream()
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before
