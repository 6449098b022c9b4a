"""Tensor bytes inside the message: works between any two machines, at the price of copies."""

from __future__ import annotations

import threading

import torch

from flashduet.errors import ConfigurationError, TransportError
from flashduet.transport.base import FeatureReceiver, FeatureSender
from flashduet.transport.tensors import (
    copy_rows,
    describe,
    layout_of_payload,
    layout_to_send,
    require_nbytes,
    view_of_buffer,
)
from flashduet.v1 import common_pb2 as pb

# Under gRPC's default limit of 4 MiB, which proxies between two hosts often keep.
CHUNK_BYTES = 2 * 1024 * 1024
# What one message of ours may carry at most (a single row wider than CHUNK_BYTES).
MAX_ROW_BYTES = 32 * 1024 * 1024


class InlineSender(FeatureSender):
    """Bytes not yet answered are bounded by `window_bytes`, as a ring bounds them."""

    transport = pb.TRANSPORT_INLINE

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._closed = False

    def put(
        self, sequence: int, session_id: bytes, epoch: int, base: int, features: torch.Tensor
    ) -> pb.TensorPayload | None:
        layout = layout_to_send(features, session_id)
        if layout.nbytes > max(CHUNK_BYTES, layout.nbytes // layout.rows):
            raise ValueError(f"{layout.nbytes} bytes in one message; cut chunks to max_rows")
        with self._lock:
            if sequence in self._sizes:
                raise ValueError(f"chunk {sequence} is still outstanding")
            if self._closed or self._bytes + layout.nbytes > self._window:
                return None
            self._sizes[sequence] = layout.nbytes
            self._bytes += layout.nbytes
        try:
            payload = describe(layout)
            # One copy: numpy knows no bfloat16, so the bytes are looked at as bytes.
            plain = features.detach().cpu().contiguous().view(torch.uint8)
            payload.inline = plain.numpy().tobytes()
        except BaseException:
            self.release(sequence)
            raise
        return payload

    def release(self, sequence: int) -> None:
        with self._lock:
            self._bytes -= self._sizes.pop(sequence, 0)

    @property
    def outstanding(self) -> int:
        return len(self._sizes)

    def max_rows(self, width: int, dtype: torch.dtype) -> int:
        row = width * dtype.itemsize
        if row > min(MAX_ROW_BYTES, self._window):
            raise ConfigurationError(
                f"one row of features has {row} bytes; a message holds {MAX_ROW_BYTES} "
                f"and the window {self._window}: raise ring_mib"
            )
        return max(1, min(CHUNK_BYTES, self._window // 4) // row)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._sizes.clear()
            self._bytes = 0


class InlineReceiver(FeatureReceiver):
    """Holds nothing but the device that its tensors go to."""

    transport = pb.TRANSPORT_INLINE

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._closed = False

    def take(
        self,
        session_id: bytes,
        epoch: int,
        base: int,
        rows: int,
        width: int,
        payload: pb.TensorPayload,
    ) -> torch.Tensor:
        if self._closed:
            raise TransportError("WRONG_TRANSPORT", "the stream is closed")
        layout = layout_of_payload(payload, "inline", rows, width)
        data = payload.inline
        require_nbytes(len(data), layout)
        features = torch.empty(rows, width, dtype=layout.dtype, device=self._device)
        source = view_of_buffer(data, read_only=True).view(layout.dtype).view(rows, width)
        copy_rows(features, source)
        return features

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
