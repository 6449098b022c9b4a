"""The draft's end of a memfd ring: read, acknowledged, refused, given back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from tests.support.rings import descriptors
from tests.unit.draft_peers import TargetPeer
from tests.unit.draft_rings import hand_ring_over, running, sockets
from tests.unit.draft_running import Running

__all__ = ["running", "sockets"]


async def test_a_ring_is_read_acknowledged_and_given_back(running: Running, sockets: Path) -> None:
    target, gateway = TargetPeer(running.channel, running.facts), running.gateway()
    offers = [pb.TRANSPORT_MEMFD, pb.TRANSPORT_INLINE]
    sender = await hand_ring_over(target, sockets, offers)
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
        sender = await hand_ring_over(target, sockets)
        await target.end()
        sender.close()
        await running.emptied()

    await one_stream()
    before = descriptors()
    for _ in range(8):
        await one_stream()
    await asyncio.sleep(0)
    assert descriptors() <= before
