"""The folder where rings are handed over: private, swept, and empty in the end."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from pathlib import Path

import pytest

from flashduet.errors import ConfigurationError, TransportError
from flashduet.transport.memfd import MemfdSender
from flashduet.transport.negotiation import Receivers, open_sender
from flashduet.transport.options import TransportOptions
from flashduet.transport.rendezvous import hand_over, socket_path
from flashduet.v1 import common_pb2 as pb
from tests.support.offers import MEMFD, SIZE, attach, hand_one_over, new_offer
from tests.support.rings import CPU, descriptors, mappings

pytest_plugins = ["tests.support.meeting"]


@pytest.mark.parametrize("instance_id", [b"", b"../../../../etc/x", bytes(15), bytes(17)])
def test_a_name_is_made_of_exactly_sixteen_bytes(folder: Path, instance_id: bytes) -> None:
    with pytest.raises(TransportError, match="length"):
        socket_path(folder, instance_id)
    assert socket_path(folder, b"../../../../etc/").parent == folder


async def test_the_folder_is_made_private_and_the_socket_too(
    draft: Receivers, folder: Path, instance: bytes
) -> None:
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert os.listdir(folder) == [f"{instance.hex()}.sock"]
    assert socket_path(folder, instance).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["open_folder", "file", "symlink", "long"])
async def test_a_folder_that_is_not_private_is_refused_with_the_fix(
    tmp_path: Path, instance: bytes, kind: str
) -> None:
    place = tmp_path / "place"
    if kind == "open_folder":
        place.mkdir(mode=0o755)
    elif kind == "file":
        place.write_text("")
    elif kind == "symlink":
        (tmp_path / "real").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "real")
    else:
        place = tmp_path / ("x" * 100)
    forced = Receivers(instance, TransportOptions("memfd", "cpu", place))
    with pytest.raises(ConfigurationError, match="SOCKET_DIR"):
        await forced.start()
    await forced.close()
    free = Receivers(instance, TransportOptions("auto", "cpu", place))
    await free.start()
    assert free.offers == [pb.TRANSPORT_INLINE]
    await free.close()


async def test_sockets_of_killed_drafts_are_swept_and_those_of_living_ones_kept(
    draft: Receivers, folder: Path, instance: bytes
) -> None:
    killed, half_born, other = folder / f"{'0' * 32}.sock", folder / "1.new", folder / "notes.txt"
    for path in (killed, half_born):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(path))
    os.utime(half_born, (0, 0))
    other.write_text("not ours")
    second = Receivers(secrets.token_bytes(16), TransportOptions("memfd", "cpu", folder))
    await second.start()
    assert not killed.exists()
    assert not half_born.exists()
    assert other.exists()
    await hand_one_over(folder, instance)
    await second.close()


async def test_closing_leaves_nothing_in_the_folder_or_in_the_process(
    folder: Path, instance: bytes
) -> None:
    before = descriptors(), mappings()
    tasks = len(asyncio.all_tasks())
    receivers = Receivers(instance, TransportOptions("memfd", "cpu", folder))
    await receivers.start()
    sender = MemfdSender(SIZE, CPU)
    offers = [new_offer() for _ in range(3)]
    for offer in offers:
        await hand_over(folder, instance, offer, [sender.descriptor])
    await receivers.open_receiver(attach(offers[0]))
    sender.close()
    for _ in range(2):
        await receivers.close()
    assert receivers.rings == 0
    assert os.listdir(folder) == []
    assert (descriptors(), mappings()) == before
    assert len(asyncio.all_tasks()) == tasks
    with pytest.raises(TransportError, match="not reachable"):
        await hand_over(folder, instance, offers[1], [])


@pytest.mark.parametrize("length", [107, 108])
async def test_a_path_that_can_be_bound_can_be_reached_too(
    length: int, instance: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A Unix address holds 107 bytes and its end; the listener's first name is a shorter one."""
    root = tmp_path_factory.mktemp("s")
    name = "d" * (length - len(str(socket_path(root / "d", instance))) + 1)
    receivers = Receivers(instance, TransportOptions("memfd", "cpu", root / name))
    if length > 107:
        with pytest.raises(ConfigurationError, match="too long"):
            await receivers.start()
        return
    await receivers.start()
    options = TransportOptions("memfd", "cpu", root / name, ring_bytes=1 << 16)
    sender, _ = await open_sender([MEMFD], instance, options)
    sender.close()
    await receivers.close()
