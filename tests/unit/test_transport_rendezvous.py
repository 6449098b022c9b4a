"""Handing a ring over: who may, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import struct
from pathlib import Path

import pytest
import torch

from flashduet.errors import Incompatible, TransportError
from flashduet.transport import rendezvous
from flashduet.transport.memfd import MemfdSender
from flashduet.transport.negotiation import Receivers
from flashduet.transport.rendezvous import RingOffer, hand_over, socket_path
from flashduet.v1 import common_pb2 as pb
from tests.support.offers import MEMFD, SIZE, attach, hand_one_over, new_offer
from tests.support.rings import CPU, descriptors, mappings

pytest_plugins = ["tests.support.meeting"]


async def exchange(
    path: Path, packet: bytes, fds: list[int], *, type_: int = socket.SOCK_SEQPACKET
) -> bytes:
    """Send a raw packet as a hostile target might, and return the answer."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, type_) as peer:
        peer.setblocking(False)
        await loop.sock_connect(peer, str(path))
        if fds:
            socket.send_fds(peer, [packet], fds)
        else:
            peer.send(packet)
        return await asyncio.wait_for(loop.sock_recv(peer, 16), 10)


async def test_a_ring_is_handed_over_once_and_works(
    draft: Receivers, folder: Path, instance: bytes
) -> None:
    sender = MemfdSender(SIZE, CPU)
    offer = new_offer(sender.ring_bytes)
    await hand_over(folder, instance, offer, [sender.descriptor])
    sender.close_descriptor()
    assert draft.rings == 1
    receiver = await draft.open_receiver(attach(offer))
    sent = torch.randn(4, 8)
    payload = sender.put(1, bytes(16), 0, 0, sent)
    assert payload is not None
    assert torch.equal(receiver.take(bytes(16), 0, 0, 4, 8, payload), sent)
    with pytest.raises(Incompatible):  # a token is good for one stream
        await draft.open_receiver(attach(offer))
    assert draft.rings == 1
    receiver.close()
    assert draft.rings == 0
    sender.close()


@pytest.mark.parametrize("wrong", ["token", "ring_bytes"])
async def test_an_attach_that_does_not_describe_the_ring_is_refused(
    draft: Receivers, folder: Path, instance: bytes, wrong: str
) -> None:
    sender = MemfdSender(SIZE, CPU)
    offer = new_offer(sender.ring_bytes)
    await hand_over(folder, instance, offer, [sender.descriptor])
    message = attach(offer)
    if wrong == "token":
        message.ring_token = secrets.token_bytes(16)
    else:
        message.ring_bytes += 4096
    with pytest.raises(Incompatible):
        await draft.open_receiver(message)
    sender.close()


async def test_packets_that_are_no_offer_are_refused_and_their_descriptors_closed(
    draft: Receivers, folder: Path, instance: bytes
) -> None:
    path = socket_path(folder, instance)
    sender = MemfdSender(SIZE, CPU)
    ring = sender.descriptor
    good = new_offer()
    cases: list[tuple[bytes, list[int]]] = [
        (b"x", []),
        (b"x" * 1000, [ring]),
        (good.encode()[:-1], [ring]),
        (good.encode() + b"x", [ring]),
        (b"FDRING99" + good.encode()[8:], [ring]),
        (good.encode(), []),  # no descriptor
        (good.encode(), [ring, ring]),  # one too many: cut short by the kernel
        (good.encode(), [ring] * 50),
        (RingOffer(MEMFD, good.token, SIZE * 2).encode(), [ring]),
        (RingOffer(MEMFD, good.token, 2**64 - 1).encode(), [ring]),
        (RingOffer(pb.TRANSPORT_INLINE, good.token, SIZE).encode(), [ring]),
        (RingOffer(pb.TRANSPORT_CUDA_IPC, good.token, SIZE).encode(), []),
        (RingOffer(99, good.token, SIZE).encode(), [ring]),
    ]
    before = descriptors(), mappings()
    for packet, fds in cases:
        assert await exchange(path, packet, fds) == b"\x02", packet[:12]
        assert draft.rings == 0
    assert (descriptors(), mappings()) == before
    # The listener is as good as before.
    assert await exchange(path, good.encode(), [ring]) == b"\x01"
    sender.close()


async def test_a_ring_of_a_transport_that_is_not_offered_is_refused(
    draft: Receivers, folder: Path, instance: bytes
) -> None:
    draft.offers = [pb.TRANSPORT_CUDA_IPC]
    sender = MemfdSender(SIZE, CPU)
    with pytest.raises(TransportError, match="refused the ring"):
        await hand_over(folder, instance, RingOffer(MEMFD, bytes(16), SIZE), [sender.descriptor])
    assert draft.rings == 0
    sender.close()


async def test_an_unsealed_memfd_is_refused(
    draft: Receivers, folder: Path, instance: bytes
) -> None:
    ring = os.memfd_create("flashduet-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(ring, SIZE)
    os.posix_fallocate(ring, 0, SIZE)
    fcntl.fcntl(ring, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    before = mappings()
    with pytest.raises(TransportError, match="refused the ring"):
        await hand_over(folder, instance, RingOffer(MEMFD, bytes(16), SIZE), [ring])
    assert mappings() == before
    os.close(ring)


async def test_a_token_in_use_is_refused_and_the_first_ring_kept(
    draft: Receivers, folder: Path, instance: bytes
) -> None:
    sender = MemfdSender(SIZE, CPU)
    offer = new_offer()
    await hand_over(folder, instance, offer, [sender.descriptor])
    with pytest.raises(TransportError, match="refused"):
        await hand_over(folder, instance, offer, [sender.descriptor])
    assert draft.rings == 1
    sender.close()


async def test_unclaimed_rings_are_bounded_and_expire(
    draft: Receivers, folder: Path, instance: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_PENDING", 3)
    monkeypatch.setattr(rendezvous, "PENDING_TIMEOUT_S", 0.5)
    before = descriptors(), mappings()
    sender = MemfdSender(SIZE, CPU)
    for _ in range(3):
        offer = new_offer()
        await hand_over(folder, instance, offer, [sender.descriptor])
    with pytest.raises(TransportError, match="too many"):
        await hand_over(folder, instance, new_offer(), [sender.descriptor])
    for _ in range(100):
        if draft.rings == 0:
            break
        await asyncio.sleep(0.05)
    assert draft.rings == 0
    with pytest.raises(Incompatible, match="expired"):
        await draft.open_receiver(attach(offer))
    sender.close()
    assert (descriptors(), mappings()) == before


async def test_a_silent_peer_is_dropped_and_the_others_are_served(
    draft: Receivers, folder: Path, instance: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "EXCHANGE_TIMEOUT_S", 0.3)
    path = str(socket_path(folder, instance))
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.setblocking(False)
        await loop.sock_connect(silent, path)
        await hand_one_over(folder, instance)
        assert await asyncio.wait_for(loop.sock_recv(silent, 16), 10) == b"\x02"


async def test_a_draft_that_never_answers_is_given_up(
    folder: Path, instance: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "EXCHANGE_TIMEOUT_S", 0.2)
    os.mkdir(folder, 0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(str(socket_path(folder, instance)))
        mute.listen(1)
        with pytest.raises(TransportError, match="did not answer"):
            await hand_over(folder, instance, RingOffer(MEMFD, bytes(16), SIZE), [])


@pytest.mark.parametrize("side", ["target", "draft"])
async def test_another_user_is_refused_on_both_sides(
    draft: Receivers, folder: Path, instance: bytes, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """One process plays both, so the credentials that the kernel gives are changed for one."""
    real = rendezvous._require_same_user

    def look(peer: socket.socket) -> None:
        is_draft = peer.getsockname() != "" and peer.getsockname() != b""
        real(_Foreign(peer) if is_draft == (side == "draft") else peer)  # type: ignore[arg-type]

    monkeypatch.setattr(rendezvous, "_require_same_user", look)
    sender = MemfdSender(SIZE, CPU)
    with pytest.raises(TransportError, match=r"another user|refused|reset"):
        await hand_over(folder, instance, RingOffer(MEMFD, bytes(16), SIZE), [sender.descriptor])
    assert draft.rings == 0
    sender.close()


class _Foreign:
    """A connection whose other end belongs to somebody else."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        pid, user, group = struct.unpack("iII", self._peer.getsockopt(level, option, length))
        return struct.pack("iII", pid, user + 1, group)


async def test_a_crowd_of_idle_connections_does_not_grow_without_bound(
    draft: Receivers, folder: Path, instance: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "EXCHANGE_TIMEOUT_S", 0.5)
    loop = asyncio.get_running_loop()
    path = str(socket_path(folder, instance))
    with contextlib.ExitStack() as stack:
        for _ in range(4 * rendezvous.MAX_CONNECTIONS):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            peer.setblocking(False)
            await loop.sock_connect(peer, path)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert len(draft._listener._tasks) <= rendezvous.MAX_CONNECTIONS + 1
    await asyncio.sleep(0.6)
    await hand_one_over(folder, instance)
