"""A ring in a sealed, anonymous file that one process writes and another maps read-only.

It has no name to guess, needs no room in /dev/shm and no shared IPC namespace, and vanishes with
its last holder, also after kill -9. The seals make it safe to map: SHRINK and GROW fix its size, so
that no access inside the mapping can raise SIGBUS, and FUTURE_WRITE, set once the owner has its own
writable map, leaves every other holder with reading.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import sys
from dataclasses import dataclass

import torch

from flashduet.errors import TransportError
from flashduet.transport.options import MAX_RING_BYTES, MIN_RING_BYTES
from flashduet.transport.records import RecordMemory
from flashduet.transport.rings import RingReceiver, RingSender
from flashduet.transport.tensors import view_of_buffer
from flashduet.v1 import common_pb2 as pb

log = logging.getLogger(__name__)

# Linux numbers that Python 3.11 does not name.
_F_SEAL_FUTURE_WRITE = 0x10
_MFD_NOEXEC_SEAL = 0x8
_CUDA_HOST_REGISTER_READ_ONLY = 0x8


def _seals() -> int:
    """What a ring must carry; the names exist on Linux only."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


@dataclass(frozen=True, slots=True)
class WritableRing:
    """The owner's side: `descriptor` is to be passed on and closed, `buffer` is the mapping,
    uint8 [nbytes]."""

    descriptor: int
    buffer: torch.Tensor


def available() -> bool:
    """Whether this system can make sealed rings (Linux 5.1 or later)."""
    if sys.platform != "linux":
        return False
    try:
        os.close(create_ring(mmap.PAGESIZE).descriptor)
    except OSError:
        return False
    return True


def create_ring(nbytes: int) -> WritableRing:
    """A new sealed ring of `nbytes`, rounded up to whole pages.

    All its memory is allocated here, so that too little of it is an error now and not a SIGBUS in
    the middle of a chunk.

    Raises:
        OSError: no memory, no descriptor, or a kernel that lacks one of the seals.
    """
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = _create_memfd()
    try:
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapping = mmap.mmap(descriptor, nbytes, flags=flags)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return WritableRing(descriptor, view_of_buffer(mapping))


def map_ring(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a ring that came from a peer, once it has proved harmless; does not close `descriptor`.

    Returns:
        uint8 [nbytes], which must not be written to (a write is a crash).

    Raises:
        TransportError: it is not a sealed memfd of that size with all its memory allocated.
        OSError: it cannot be mapped.
    """
    _require_harmless(descriptor, nbytes)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    mapping = mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ)
    return view_of_buffer(mapping, read_only=True)


class MemfdSender(RingSender):
    """Made with its ring; `descriptor` is passed on by the negotiation, which then closes it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises OSError when the ring cannot be made."""
        ring = create_ring(nbytes)
        self.descriptor = ring.descriptor
        self.ring_bytes = ring.buffer.numel()
        try:
            pinned = _pin(ring.buffer, device, flags=0)
        except BaseException:
            self.close_descriptor()
            raise
        super().__init__(
            pb.TRANSPORT_MEMFD, RecordMemory(ring.buffer), lambda _: _unpin(ring.buffer, pinned)
        )

    def close_descriptor(self) -> None:
        """The mapping stays; the file is no longer reachable from here. Callable twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self.close_descriptor()
        super().close()


def open_receiver(descriptor: int, nbytes: int, device: torch.device) -> RingReceiver:
    """A receiver over a peer's ring; does not close `descriptor`. Raises as `map_ring`."""
    buffer = map_ring(descriptor, nbytes)
    pinned = _pin(buffer, device, flags=_CUDA_HOST_REGISTER_READ_ONLY)
    memory = RecordMemory(buffer)
    return RingReceiver(pb.TRANSPORT_MEMFD, memory, device, lambda _: _unpin(buffer, pinned))


def _create_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("flashduet-ring", flags | _MFD_NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        return os.memfd_create("flashduet-ring", flags)


def _require_harmless(descriptor: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransportError("WRONG_TRANSPORT", "the ring is not a memfd") from error
    if seals & _seals() != _seals():
        raise TransportError("WRONG_TRANSPORT", "the ring is not sealed: its size could change")
    status = os.fstat(descriptor)
    if status.st_size != nbytes or not MIN_RING_BYTES <= nbytes <= MAX_RING_BYTES:
        raise TransportError(
            "WRONG_SIZE", f"the ring has {status.st_size} bytes, {nbytes} were announced"
        )
    # A hole would be filled on our account when we read it; huge pages might not be there at all.
    if status.st_blocks * 512 < nbytes or os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        raise TransportError("WRONG_SIZE", "the ring's memory is not allocated")


def _pin(buffer: torch.Tensor, device: torch.device, flags: int) -> bool:
    """Register the mapping with CUDA so that copies run at full speed; pageable copies work too."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), flags)
    if int(status) != 0:
        log.warning("the memfd ring could not be pinned (CUDA error %d)", int(status))
    return int(status) == 0


def _unpin(buffer: torch.Tensor, pinned: bool) -> None:
    if pinned:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
