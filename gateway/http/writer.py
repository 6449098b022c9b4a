"""Turns the core's events into the objects of one kind of answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from flashduet import __version__
from flashduet.v1 import gateway_pb2 as pb
from gateway.http.shapes import Answer
from gateway.http.totals import Totals

_FINGERPRINT = f"flashduet-{__version__}"


class Writer(ABC):
    """Writes one answer, whole or in pieces that all bear the same id and time."""

    def __init__(self, answer_id: str, model: str, totals: Totals, *, logprobs: bool) -> None:
        self.answer_id = answer_id
        self.totals = totals
        self._common: dict[str, Any] = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._logprobs = logprobs

    @abstractmethod
    def keep(self, index: int, chunk: pb.GenerateChunk) -> None:
        """Add a piece of a choice to what `whole` will say."""

    @abstractmethod
    def whole(self) -> Answer:
        """The answer, once it is over."""

    @abstractmethod
    def openings(self) -> Iterator[Answer]:
        """What a stream begins with, before the first token."""

    @abstractmethod
    def piece(self, index: int, chunk: pb.GenerateChunk) -> Answer | None:
        """A piece of a stream; None where the chunk has nothing to say yet."""

    @abstractmethod
    def closing(self, index: int, finished: pb.GenerateFinished) -> Answer:
        """The last piece of a choice, which says why it ended."""

    @abstractmethod
    def without_choices(self) -> Answer:
        """The piece that ends a stream for which usage was asked."""
