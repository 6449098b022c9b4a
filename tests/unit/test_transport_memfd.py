"""The sealed ring: what its owner makes, and what a reader accepts before it maps anything."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashduet.errors import TransportError
from flashduet.transport import memfd
from flashduet.transport.memfd import MemfdSender, create_ring, map_ring, open_receiver
from flashduet.transport.options import MAX_RING_BYTES, MIN_RING_BYTES
from flashduet.v1 import common_pb2 as pb
from tests.support.rings import CPU, descriptors, mappings

SIZE = 1 << 20
SESSION = bytes(16)
SHRINK, GROW, FUTURE_WRITE = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, 0x10


def raw_memfd(size: int, seals: int, *, allocate: bool = True) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if allocate:
        os.posix_fallocate(descriptor, 0, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.fixture
def ring() -> Iterator[memfd.WritableRing]:
    made = create_ring(SIZE)
    yield made
    os.close(made.descriptor)


def test_this_system_has_memfd() -> None:
    assert memfd.available()


def test_the_owners_writes_are_seen_by_the_reader(ring: memfd.WritableRing) -> None:
    seen = map_ring(ring.descriptor, SIZE)
    ring.buffer[12345] = 77
    assert int(seen[12345]) == 77


def test_the_size_cannot_change_any_more(ring: memfd.WritableRing) -> None:
    for size in (0, SIZE - mmap.PAGESIZE, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(ring.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_whoever_gets_the_descriptor_can_only_read(ring: memfd.WritableRing) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(ring.descriptor, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(ring.descriptor, b"x", 0)


def test_all_memory_is_there_from_the_start(ring: memfd.WritableRing) -> None:
    assert os.fstat(ring.descriptor).st_blocks * 512 >= SIZE


def test_sizes_are_rounded_up_to_pages() -> None:
    made = create_ring(SIZE + 1)
    os.close(made.descriptor)
    assert made.buffer.numel() == SIZE + mmap.PAGESIZE


@pytest.mark.parametrize("missing", [SHRINK, GROW, FUTURE_WRITE])
def test_a_ring_that_lacks_a_seal_is_refused(missing: int) -> None:
    descriptor = raw_memfd(SIZE, (SHRINK | GROW | FUTURE_WRITE) & ~missing)
    try:
        with pytest.raises(TransportError, match="not sealed"):
            map_ring(descriptor, SIZE)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("announced", [0, SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE, 2**63])
def test_a_ring_of_another_size_than_announced_is_refused(announced: int) -> None:
    descriptor = raw_memfd(SIZE, SHRINK | GROW | FUTURE_WRITE)
    try:
        with pytest.raises(TransportError) as refused:
            map_ring(descriptor, announced)
        assert refused.value.reason == "WRONG_SIZE"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [0, MIN_RING_BYTES // 2, MAX_RING_BYTES + mmap.PAGESIZE])
def test_rings_outside_the_limits_are_refused(size: int) -> None:
    descriptor = raw_memfd(size, SHRINK | GROW | FUTURE_WRITE, allocate=False)
    try:
        with pytest.raises(TransportError) as refused:
            map_ring(descriptor, size)
        assert refused.value.reason == "WRONG_SIZE"
    finally:
        os.close(descriptor)


def test_a_ring_with_holes_is_refused() -> None:
    """Its pages would be allocated on the reader's account, where there may be no memory."""
    descriptor = raw_memfd(SIZE, SHRINK | GROW | FUTURE_WRITE, allocate=False)
    try:
        with pytest.raises(TransportError, match="not allocated"):
            map_ring(descriptor, SIZE)
    finally:
        os.close(descriptor)


def test_descriptors_that_are_no_memfd_are_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(SIZE))
    left, right = socket.socketpair()
    reading, writing = os.pipe()
    file, folder = os.open(plain, os.O_RDWR), os.open(tmp_path, os.O_RDONLY)
    opened = [left.detach(), right.detach(), reading, writing, file, folder]
    try:
        for descriptor in opened:
            with pytest.raises(TransportError):
                map_ring(descriptor, SIZE)
    finally:
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_goes_through_the_ring(dtype: torch.dtype) -> None:
    sender = MemfdSender(SIZE, CPU)
    receiver = open_receiver(sender.descriptor, sender.ring_bytes, CPU)
    sender.close_descriptor()
    sent = torch.randn(5, 96).to(dtype)
    payload = sender.put(1, SESSION, 2, 3, sent)
    assert payload is not None
    assert payload.WhichOneof("storage") == "ring"
    assert torch.equal(receiver.take(SESSION, 2, 3, 5, 96, payload), sent)
    assert sender.transport == receiver.transport == pb.TRANSPORT_MEMFD
    sender.close()
    receiver.close()


def test_the_reader_still_reads_after_the_writer_has_gone() -> None:
    sender = MemfdSender(SIZE, CPU)
    receiver = open_receiver(sender.descriptor, sender.ring_bytes, CPU)
    sent = torch.randn(5, 96)
    payload = sender.put(1, SESSION, 0, 0, sent)
    sender.close()
    del sender
    assert payload is not None
    assert torch.equal(receiver.take(SESSION, 0, 0, 5, 96, payload), sent)
    receiver.close()


def test_closing_leaves_no_descriptor_and_no_mapping() -> None:
    before = descriptors(), mappings()
    for _ in range(20):
        sender = MemfdSender(SIZE, CPU)
        receiver = open_receiver(sender.descriptor, sender.ring_bytes, CPU)
        sender.put(1, SESSION, 0, 0, torch.randn(5, 96))
        sender.close()
        receiver.close()
        assert (descriptors(), mappings()) == before  # while both objects are still alive


def test_a_refused_ring_leaves_no_descriptor_and_no_mapping(ring: memfd.WritableRing) -> None:
    before = descriptors(), mappings()
    for _ in range(20):
        with pytest.raises(TransportError):
            open_receiver(ring.descriptor, SIZE // 2, CPU)
    assert (descriptors(), mappings()) == before


def test_a_ring_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: int) -> None:
        raise OSError(28, "No space left on device")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(OSError, match="No space"):
        MemfdSender(SIZE, CPU)
    assert descriptors() == before
    assert not memfd.available()


def test_kernels_without_noexec_seals_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def old_kernel(name: str, flags: int) -> int:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(22, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    made = create_ring(SIZE)
    assert map_ring(made.descriptor, SIZE).numel() == SIZE
    os.close(made.descriptor)
