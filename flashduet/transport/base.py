"""The two ends of a tensor transport, one pair per Ingest stream.

Ownership: the sender owns every record until the draft has answered it (ack or nack) and, if that
said that it is lent, until the draft has named it as released. The receiver owns the copies that it
returns. Each side frees what it holds in `close()`, which its stream's end calls; the other side's
death never blocks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashduet.v1 import common_pb2 as pb

SESSION_ID_BYTES = 16
# Capability of a target that waits for the release of records that the draft says are lent.
LENT_RECORDS = "lent-records"


class FeatureSender(ABC):
    """Target side. `put` is called by one engine thread, `release` by the stream's thread."""

    transport: pb.Transport = pb.TRANSPORT_UNSPECIFIED

    @abstractmethod
    def put(
        self, sequence: int, session_id: bytes, epoch: int, base: int, features: torch.Tensor
    ) -> pb.TensorPayload | None:
        """Write one chunk and return the descriptor to send with it; never waits for the peer.

        The bytes are in place when this returns (a GPU's stream has been synchronized).

        Args:
            sequence: number of the chunk in its stream; the answer to it releases the record.
            session_id: 16 bytes.
            epoch: of the session.
            base: absolute position of the first row.
            features: [rows, width] float32, float16 or bfloat16, on any device, any strides.

        Returns:
            The descriptor, or None when there is no room (or the sender is closed): then nothing
            was written and the chunk is to be dropped.

        Raises:
            ValueError: a chunk that could never be sent: wrong dtype or shape, more rows than
                `max_rows`, a session id of another length, a sequence that is still outstanding.
        """

    @abstractmethod
    def release(self, sequence: int) -> None:
        """The chunk was answered: its record is free. Unknown and repeated numbers do nothing."""

    @property
    @abstractmethod
    def outstanding(self) -> int:
        """Records written and not yet released."""

    @abstractmethod
    def max_rows(self, width: int, dtype: torch.dtype) -> int:
        """Most rows of a chunk. Several chunks of this size fit, so that both sides keep busy.

        Raises:
            ConfigurationError: not even one row fits; the message names the setting.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back everything held. Later calls of `put` return None. Callable twice."""


@dataclass(frozen=True, slots=True)
class Loan:
    """A chunk in the ring.

    Attributes:
        features: [rows, width], to be read only: the mapping is write-protected, and a write to it
            ends the process.
        intact: whether the record still is the one described. To be asked once the features have
            been read, and before what came of them counts.
    """

    features: torch.Tensor
    intact: Callable[[], bool]


class FeatureReceiver(ABC):
    """Draft side. `ring_bytes` is what is mapped, 0 where the bytes come in messages."""

    transport: pb.Transport = pb.TRANSPORT_UNSPECIFIED
    ring_bytes: int = 0

    @abstractmethod
    def take(
        self,
        session_id: bytes,
        epoch: int,
        base: int,
        rows: int,
        width: int,
        payload: pb.TensorPayload,
    ) -> torch.Tensor:
        """Copy one chunk out.

        Every field of `payload` is checked against what the caller expects before a byte is
        touched, and a ring record's header before and after the copy, so that whatever the peer
        does, the result is either the chunk it wrote or an error.

        Args:
            session_id, epoch, base: what the chunk's message says it holds.
            rows: one per token id of the message.
            width: of a row, from this side's own checkpoint.
            payload: the message's TensorPayload.

        Returns:
            [rows, width] on this receiver's device, owned by the caller, in the payload's dtype.

        Raises:
            TransportError: `reason` is a NackReason without its prefix.
        """

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
        """The chunk where it lies, or None: it is to be taken.

        Everything is checked as `take` does it before. The sender is not to be told that the record
        is free before `returned` names `sequence`, the number of the chunk in its stream.

        Raises:
            TransportError: as `take`.
        """
        return None

    @property
    def lent(self) -> int:
        """Chunks lent and not yet named by `returned`."""
        return 0

    def returned(self) -> list[int]:
        """Sequences of lent chunks whose tensors have gone since the last call."""
        return []

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether `close` was called."""

    @abstractmethod
    def close(self) -> None:
        """Give back the mapping. Later calls of `take` raise. Callable twice."""
