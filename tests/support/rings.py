"""Both ends of a ring in this process, and what a process holds of rings."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from flashduet.transport.records import RecordMemory
from flashduet.transport.rings import RingReceiver, RingSender
from flashduet.v1 import common_pb2 as pb

CPU = torch.device("cpu")
SESSION = bytes(range(16))
WIDTH = 24


class RingEnds:
    """Over one ordinary buffer.

    Attributes:
        returned: which ends have given their memory back.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.buffer = torch.zeros(capacity, dtype=torch.uint8)
        self.returned: list[str] = []
        self.sender = RingSender(
            pb.TRANSPORT_MEMFD, RecordMemory(self.buffer), lambda _: self.returned.append("sender")
        )
        self.receiver = RingReceiver(
            pb.TRANSPORT_MEMFD,
            RecordMemory(self.buffer),
            CPU,
            lambda _: self.returned.append("receiver"),
        )

    def put(self, sequence: int, features: torch.Tensor) -> pb.TensorPayload:
        payload = self.sender.put(sequence, SESSION, 0, 5, features)
        assert payload is not None
        return payload

    def take(self, payload: pb.TensorPayload, rows: int = 3, width: int = WIDTH) -> torch.Tensor:
        return self.receiver.take(SESSION, 0, 5, rows, width, payload)


def features_of(
    rows: int = 3, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(rows, width).to(dtype)


def descriptors() -> int:
    """Open in this process."""
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Of rings, in this process."""
    return Path("/proc/self/maps").read_text().count("flashduet-ring")
