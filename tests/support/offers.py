"""Rings as targets hand them over."""

from __future__ import annotations

import secrets
from pathlib import Path

from flashduet.transport.memfd import MemfdSender
from flashduet.transport.rendezvous import RingOffer, hand_over
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2
from tests.support.rings import CPU

SIZE = 1 << 20
MEMFD = pb.TRANSPORT_MEMFD


def new_offer(ring_bytes: int = SIZE) -> RingOffer:
    return RingOffer(MEMFD, secrets.token_bytes(16), ring_bytes)


async def hand_one_over(folder: Path, instance: bytes) -> None:
    """A target comes, hands a ring over as it should, and goes."""
    sender = MemfdSender(SIZE, CPU)
    await hand_over(folder, instance, new_offer(), [sender.descriptor])
    sender.close()


def attach(offer: RingOffer) -> draft_pb2.IngestAttach:
    return draft_pb2.IngestAttach(
        transport=MEMFD, ring_bytes=offer.ring_bytes, ring_token=offer.token
    )
