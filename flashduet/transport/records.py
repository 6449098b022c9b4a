"""A ring's memory: records with headers, written and read through one uint8 tensor.

The same code serves a mapped memfd and device memory. A record is eight 64-bit words of header and
the payload. The generation is its first word: zero while the record is written, set last, and
looked at before and after a read (a sequence lock), so that a reader can tell a record that was
replaced under its hands from one that was not. Between the two sides' memory accesses lies the
descriptor's way through a socket, which orders them on every CPU; the sequence lock is there for
the peer that does not keep to the protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flashduet.errors import TransportError
from flashduet.transport.buffers import Buffers
from flashduet.transport.ring import ALIGNMENT, HEADER_BYTES
from flashduet.transport.tensors import (
    DATA_TYPES,
    TensorLayout,
    copy_bytes,
    copy_rows,
    rows_of_bytes,
)

WORDS = HEADER_BYTES // 8
_WORD_BYTES = 8
# Generation, bytes, session, epoch, base, rows, element type and width.
_HEADER = struct.Struct("<QQ16sQQQQ")
# Of memory for chunks that were read, kept for the next ones: a few of the usual size.
_IDLE_BYTES = 16 << 20
# What it means when a word of the header is not the expected one, in the order of the words.
_REASONS = (
    "STALE_GENERATION",  # generation
    "WRONG_SIZE",  # nbytes
    "STALE_GENERATION",  # session, both halves: the record holds another chunk
    "STALE_GENERATION",
    "STALE_GENERATION",  # epoch
    "STALE_GENERATION",  # base
    "WRONG_SHAPE",  # rows
    "WRONG_SHAPE",  # element type and width
)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says about itself."""

    generation: int
    session_id: bytes
    epoch: int
    base: int
    layout: TensorLayout

    def packed(self) -> bytes:
        """The eight words as they lie in the ring."""
        layout = self.layout
        return _HEADER.pack(
            self.generation,
            layout.nbytes,
            self.session_id,
            self.epoch,
            self.base,
            layout.rows,
            DATA_TYPES[layout.dtype] << 40 | layout.width,
        )


class RecordMemory:
    """Reads and writes records in `buffer`, a uint8 tensor [capacity] on any device.

    Keeps no account of who owns what (that is `ring.Ring`), and is usable from several threads as
    long as they touch different records.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffers = Buffers(_IDLE_BYTES)
        self.capacity = buffer.numel() // ALIGNMENT * ALIGNMENT
        self._bytes = buffer[: self.capacity]
        self._words = self._bytes.view(torch.int64)
        # Past torch where the host can address the memory: single words take a fifth of the time
        # (and are still one access to memory), and views are cheap.
        self._host_bytes = None if buffer.is_cuda else self._bytes.numpy()
        self._host_words = None if buffer.is_cuda else self._words.numpy()
        self._host_view = None if self._host_bytes is None else self._host_bytes.data

    def write(
        self, offset: int, header: RecordHeader, features: torch.Tensor, replaced: Iterable[int]
    ) -> None:
        """Write a record at `offset`; it is in place when this returns.

        Args:
            features: [rows, width] as the header says, any device and strides.
            replaced: offsets of records that were given back since the last write. They lose their
                generation before any byte changes: their payloads may be what is overwritten now.
        """
        words = self._words if self._host_words is None else self._host_words
        for old in replaced:
            words[old // _WORD_BYTES] = 0
        first = offset // _WORD_BYTES
        words[first] = 0
        described = header.packed()[_WORD_BYTES:]
        source = rows_of_bytes(features)
        if self._host_bytes is None or source is None:
            copy_rows(self._payload(offset, header.layout), features)
        else:
            copy_bytes(self._host_payload(offset, header.layout).reshape(source.shape), source)
        if self._host_view is None:
            self._words[first + 1 : first + WORDS].copy_(_as_words(described))
        else:
            self._host_view[offset + _WORD_BYTES : offset + HEADER_BYTES] = described
        words[first] = header.generation
        if self._bytes.is_cuda:
            # The descriptor must not overtake the bytes: the peer reads on another stream.
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def read(self, offset: int, header: RecordHeader, device: torch.device) -> torch.Tensor:
        """Copy the record at `offset` out if it is the one described by `header`.

        Returns:
            [rows, width] on `device`, a copy.

        Raises:
            TransportError: OUT_OF_RANGE, STALE_GENERATION, WRONG_SIZE, WRONG_SHAPE.
        """
        expected = self._find(offset, header)
        layout = header.layout
        if device.type == "cpu":
            features = self._buffers.tensor(layout)
        else:
            features = torch.empty(layout.rows, layout.width, dtype=layout.dtype, device=device)
        copy_rows(features, self._payload(offset, layout))
        if features.is_cuda:
            # The sender may reuse the record as soon as the chunk is answered.
            torch.cuda.current_stream(features.device).synchronize()
        self._require(offset, expected)
        return features

    def lend(self, offset: int, header: RecordHeader) -> npt.NDArray[np.uint8] | None:
        """The payload's bytes [nbytes] where they lie; None in memory that NumPy cannot address.

        The array keeps the memory mapped. Raises TransportError as `read`.
        """
        self._find(offset, header)
        return None if self._host_bytes is None else self._host_payload(offset, header.layout)

    def holds(self, offset: int, header: RecordHeader) -> bool:
        """Whether the record at `offset`, which was found there before, still is this one."""
        try:
            self._require(offset, header.packed())
        except TransportError:
            return False
        return True

    def _find(self, offset: int, header: RecordHeader) -> bytes:
        """The packed header, which the record at `offset` has. Raises TransportError."""
        end = offset + HEADER_BYTES + header.layout.nbytes
        if offset < 0 or offset % ALIGNMENT or end > self.capacity:
            raise TransportError(
                "OUT_OF_RANGE", f"a record at {offset}..{end} in a ring of {self.capacity} bytes"
            )
        if header.generation == 0:
            raise TransportError("STALE_GENERATION", "generation 0 is a record being written")
        expected = header.packed()
        self._require(offset, expected)
        return expected

    def _payload(self, offset: int, layout: TensorLayout) -> torch.Tensor:
        start = offset + HEADER_BYTES
        payload = self._bytes[start : start + layout.nbytes]
        return payload.view(layout.dtype).view(layout.rows, layout.width)

    def _host_payload(self, offset: int, layout: TensorLayout) -> npt.NDArray[np.uint8]:
        assert self._host_bytes is not None
        start = offset + HEADER_BYTES
        return self._host_bytes[start : start + layout.nbytes]

    def _require(self, offset: int, expected: bytes) -> None:
        if self._host_view is None:
            first = offset // _WORD_BYTES
            found = self._words[first : first + WORDS].cpu().numpy().tobytes()
        else:
            found = bytes(self._host_view[offset : offset + HEADER_BYTES])
        if found == expected:
            return
        for name, at in zip(_REASONS, range(0, HEADER_BYTES, _WORD_BYTES), strict=True):
            if found[at : at + _WORD_BYTES] != expected[at : at + _WORD_BYTES]:
                raise TransportError(name, "the record is not, or no longer, the one described")


def _as_words(described: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(described, dtype=np.int64).copy())
