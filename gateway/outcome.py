"""How requests went: counted since the start, and told one by one to those who keep figures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from flashduet.errors import FlashduetError
from flashduet.v1 import gateway_pb2 as pb
from gateway.outbox import Emit


@dataclass(slots=True)
class RequestCounts:
    """How requests went since the start, and how many answers are under way."""

    active: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


Outcome = Literal["completed", "failed", "cancelled"]


@dataclass(slots=True)
class RequestEnd:
    """How a request went, for those who count.

    Attributes:
        error: what its client was told, if it failed.
        seconds: from its arrival.
        first_token_s: from its arrival to its first token; None without one.
    """

    outcome: Outcome = "failed"
    error: FlashduetError | None = None
    seconds: float = 0.0
    first_token_s: float | None = None
    started: pb.GenerateStarted | None = None
    complete: pb.GenerateComplete | None = None


def watched(emit: Emit, end: RequestEnd, started_at: float) -> Emit:
    """`emit`, keeping what `end` is to tell."""

    async def watched(response: pb.GenerateResponse) -> None:
        await emit(response)
        if response.HasField("chunk"):
            if end.first_token_s is None:
                end.first_token_s = time.monotonic() - started_at
        elif response.HasField("started"):
            end.started = response.started
        elif response.HasField("complete"):
            end.complete = response.complete

    return watched
