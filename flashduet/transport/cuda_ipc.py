"""A ring in GPU memory that another process opens by its CUDA IPC handle.

Rings belong to the target's process for its whole life: a stream leases one and gives it back, and
the next stream gets the same memory. Freeing memory that a peer has open is undefined, and a peer
that was killed never says that it is done. What a late reader of an old stream would see is caught
by the records' generations, which start at random with each lease.

Both devices must be visible to both processes, and containers must share their IPC and PID
namespaces; where that is not so, the draft fails to open the handle at the rendezvous and says so.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from flashduet.errors import TransportError
from flashduet.transport.cuda_driver import CudaDriver, DeviceMemory
from flashduet.transport.options import MAX_RING_BYTES, MIN_RING_BYTES
from flashduet.transport.records import RecordMemory
from flashduet.transport.rings import RingReceiver, RingSender
from flashduet.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class DeviceRing:
    """Device memory, uint8 [nbytes], and the handle that opens it elsewhere."""

    buffer: torch.Tensor
    handle: bytes


class DeviceRings:
    """A process's rings on one device: allocated once, leased, never freed."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: list[DeviceRing] = []
        self.allocated = 0

    def lease(self, nbytes: int) -> DeviceRing:
        """An idle ring of at least `nbytes`, or a new one. Raises TransportError."""
        with self._lock:
            for ring in self._idle:
                if ring.buffer.numel() >= nbytes:
                    self._idle.remove(ring)
                    return ring
        buffer = self._memory.allocate(nbytes)
        ring = DeviceRing(buffer, self._memory.export(buffer))
        with self._lock:
            self.allocated += 1
        return ring

    def give_back(self, ring: DeviceRing) -> None:
        with self._lock:
            self._idle.append(ring)


class CudaIpcSender(RingSender):
    """Holds a leased ring for the length of a stream."""

    def __init__(self, nbytes: int, rings: DeviceRings) -> None:
        """Raises TransportError when no ring can be had."""
        ring = rings.lease(nbytes)
        self.device_handle = ring.handle
        self.ring_bytes = ring.buffer.numel()
        memory = RecordMemory(ring.buffer)
        super().__init__(pb.TRANSPORT_CUDA_IPC, memory, lambda _: rings.give_back(ring))


def open_receiver(
    handle: bytes, nbytes: int, device: torch.device, memory: DeviceMemory
) -> RingReceiver:
    """A receiver over a peer's device ring.

    Raises:
        TransportError: the handle cannot be opened here, or holds less than `nbytes`.
    """
    buffer = memory.open(handle)
    if not MIN_RING_BYTES <= nbytes <= min(buffer.numel(), MAX_RING_BYTES):
        memory.close(buffer)
        raise TransportError(
            "WRONG_SIZE", f"the ring has {buffer.numel()} bytes, {nbytes} were announced"
        )
    ring = RecordMemory(buffer[:nbytes])
    return RingReceiver(pb.TRANSPORT_CUDA_IPC, ring, device, lambda _: memory.close(buffer))


_drivers: dict[torch.device, CudaDriver] = {}
_rings: dict[torch.device, DeviceRings] = {}


def driver_of(device: torch.device) -> CudaDriver:
    """The process's driver handle of a GPU, made once. Raises TransportError."""
    if device not in _drivers:
        _drivers[device] = CudaDriver(device)
    return _drivers[device]


def rings_of(device: torch.device) -> DeviceRings:
    """The process's rings on a GPU. Raises TransportError."""
    if device not in _rings:
        _rings[device] = DeviceRings(driver_of(device))
    return _rings[device]


def why_unavailable(device: torch.device) -> str | None:
    """None when memory of `device` can be exported (one ring is tried), else the reason."""
    if device.type != "cuda":
        return f"the device is {device}, not a GPU"
    try:
        rings = rings_of(device)
        rings.give_back(rings.lease(MIN_RING_BYTES))
    except TransportError as error:
        return str(error)
    return None
