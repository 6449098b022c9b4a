"""The bytes of one chunk: read where they lie in the ring if they can be lent, else copied."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flashduet.transport.base import FeatureReceiver
from flashduet.v1 import draft_pb2


class ChunkBytes:
    """Stands between a message and the transport.

    Args:
        width: of a row, from this side's own checkpoint.
        may_lend: whether the target waits for the release of lent records.
    """

    def __init__(
        self, chunk: draft_pb2.IngestChunk, width: int, receiver: FeatureReceiver, may_lend: bool
    ) -> None:
        self._chunk = chunk
        self._width = width
        self._receiver = receiver
        self._may_lend = may_lend
        self._still_there: Callable[[], bool] | None = None

    @property
    def lent(self) -> bool:
        """Whether `take` gave the ring's own memory."""
        return self._still_there is not None

    def take(self) -> Tensor:
        """[rows, width], not to be written to. Raises TransportError."""
        chunk = self._chunk
        rows = len(chunk.token_ids)
        described = (chunk.session_id, chunk.epoch, chunk.base, rows, self._width, chunk.features)
        if self._may_lend:
            loan = self._receiver.lend(chunk.sequence, *described)
            if loan is not None:
                # Not the loan itself, which lasts as long as its tensor.
                self._still_there = loan.intact
                return loan.features
        return self._receiver.take(*described)

    def intact(self) -> bool:
        """Whether what was read since `take` is what the target sent."""
        return self._still_there is None or self._still_there()
