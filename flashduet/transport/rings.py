"""Sender and receiver over a ring, whatever memory it lies in (memfd or device)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from flashduet.errors import ConfigurationError, TransportError
from flashduet.transport.base import SESSION_ID_BYTES, FeatureReceiver, FeatureSender, Loan
from flashduet.transport.held import Held
from flashduet.transport.loans import LENT_SHARE, Loans
from flashduet.transport.records import RecordHeader, RecordMemory
from flashduet.transport.ring import ALIGNMENT, HEADER_BYTES, Ring, Slot
from flashduet.transport.tensors import (
    describe,
    layout_of_payload,
    layout_to_send,
    require_nbytes,
)
from flashduet.v1 import common_pb2 as pb

# A chunk takes at most this share of the ring, so that the draft reads one while the next is
# written, and several sessions' chunks fit beside each other.
CHUNK_SHARE = 4


class RingSender(FeatureSender):
    """Owns the ring's memory; `give_back` gets it when the stream is over."""

    def __init__(
        self,
        transport: pb.Transport,
        memory: RecordMemory,
        give_back: Callable[[RecordMemory], None],
    ) -> None:
        self.transport = transport
        self._memory = Held(memory, give_back)
        self._lock = threading.Lock()  # bookkeeping only, never held during a copy
        self._ring = Ring(memory.capacity)
        self._slots: dict[int, Slot] = {}
        self._replaced: list[int] = []  # offsets given back since the last write
        self._closed = False

    def put(
        self, sequence: int, session_id: bytes, epoch: int, base: int, features: torch.Tensor
    ) -> pb.TensorPayload | None:
        layout = layout_to_send(features, session_id)
        with self._memory.use() as memory:
            if memory is None:
                return None
            with self._lock:
                if sequence in self._slots:
                    raise ValueError(f"chunk {sequence} is still outstanding")
                slot = None if self._closed else self._ring.allocate(layout.nbytes)
                if slot is None:
                    return None
                self._slots[sequence] = slot
                replaced, self._replaced = self._replaced, []
            header = RecordHeader(slot.generation, session_id, epoch, base, layout)
            try:
                memory.write(slot.offset, header, features, replaced)
            except BaseException:
                self.release(sequence)
                with self._lock:
                    self._replaced += replaced
                raise
        payload = describe(layout)
        payload.ring.offset = slot.offset
        payload.ring.generation = slot.generation
        payload.ring.nbytes = layout.nbytes
        return payload

    def release(self, sequence: int) -> None:
        with self._lock:
            slot = self._slots.pop(sequence, None)
            if slot is not None:
                self._ring.free(slot.generation)
                self._replaced.append(slot.offset)

    @property
    def outstanding(self) -> int:
        return len(self._slots)

    def max_rows(self, width: int, dtype: torch.dtype) -> int:
        row = width * dtype.itemsize
        share = self._ring.capacity // CHUNK_SHARE // ALIGNMENT * ALIGNMENT
        for room in (share, self._ring.capacity):
            if rows := (room - HEADER_BYTES) // row:
                return rows
        raise ConfigurationError(
            f"one row of features has {row} bytes, the ring {self._ring.capacity}: raise ring_mib"
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._slots.clear()
        self._memory.close()


class RingReceiver(FeatureReceiver):
    """Reads a ring that a peer writes; `give_back` gets the memory when the stream is over."""

    def __init__(
        self,
        transport: pb.Transport,
        memory: RecordMemory,
        device: torch.device,
        give_back: Callable[[RecordMemory], None],
    ) -> None:
        self.transport = transport
        self.ring_bytes = memory.capacity
        self._memory = Held(memory, give_back)
        self._device = device
        self._loans = Loans(memory.capacity // LENT_SHARE)

    def take(
        self,
        session_id: bytes,
        epoch: int,
        base: int,
        rows: int,
        width: int,
        payload: pb.TensorPayload,
    ) -> torch.Tensor:
        header = _described(session_id, epoch, base, rows, width, payload)
        with self._memory.use() as memory:
            if memory is None:
                raise TransportError("WRONG_TRANSPORT", "the stream's ring is closed")
            return memory.read(payload.ring.offset, header, self._device)

    def lend(
        self,
        sequence: int,
        session_id: bytes,
        epoch: int,
        base: int,
        rows: int,
        width: int,
        payload: pb.TensorPayload,
    ) -> Loan | None:
        header = _described(session_id, epoch, base, rows, width, payload)
        layout, offset = header.layout, payload.ring.offset
        if self._device.type != "cpu" or not self._loans.may_begin(sequence, layout.nbytes):
            return None
        with self._memory.use() as memory:
            if memory is None:
                raise TransportError("WRONG_TRANSPORT", "the stream's ring is closed")
            lent = memory.lend(offset, header)
            if lent is None:
                return None
            # The memory is kept by the tensor and by `holds`, also after this receiver is closed.
            features = self._loans.begin(sequence, lent, layout)
            return Loan(features, partial(memory.holds, offset, header))

    @property
    def lent(self) -> int:
        return self._loans.outstanding

    def returned(self) -> list[int]:
        return self._loans.collect()

    @property
    def closed(self) -> bool:
        return self._memory.closed

    def close(self) -> None:
        self._memory.close()


def _described(
    session_id: bytes, epoch: int, base: int, rows: int, width: int, payload: pb.TensorPayload
) -> RecordHeader:
    """The header that the described record must have, once the description fits what is due."""
    layout = layout_of_payload(payload, "ring", rows, width)
    require_nbytes(payload.ring.nbytes, layout)
    if len(session_id) != SESSION_ID_BYTES:
        raise TransportError("UNKNOWN_SESSION", "a session id of the wrong length")
    return RecordHeader(payload.ring.generation, session_id, epoch, base, layout)
