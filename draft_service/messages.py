"""What crosses between the streams and the coordinator: the wire's messages without the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from torch import Tensor

from draft_service.refusals import ProposalRefused
from draft_service.work import Drafts, StepTimes


@dataclass(frozen=True, slots=True)
class Limits:
    """Most that this replica takes: sessions, anchor + draft tokens of a block, seconds of a lease,
    and ids that a token may have."""

    max_sessions: int
    max_block_length: int
    lease_s: float
    vocab_size: int


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A proposal that is wanted; see ProposeBlock for the fields.

    `arrived_ns` is a time.time_ns() value; `trace` is the context of the span that covers it.
    """

    round: int
    committed_length: int
    anchor_token_id: int
    block_length: int
    budget_us: int
    arrived_ns: int
    trace: Context | None = None


@dataclass(frozen=True, slots=True)
class BlockDrafted:
    """The drafts, when their context was complete, and when the step's phases were."""

    drafts: Drafts
    arrived_ns: int
    context_ns: int
    times: StepTimes


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk before its bytes are looked at; see IngestChunk.

    `take` gives them, to be read only; what came of reading them counts only if `intact` says so
    afterwards. `token_ids` has one for each row; `transport` is the transport's name for spans.
    """

    session_id: bytes
    epoch: int
    base: int
    token_ids: Sequence[int]
    target_instance_id: bytes
    take: Callable[[], Tensor]
    transport: str
    arrived_ns: int
    trace: Context | None = None
    intact: Callable[[], bool] = lambda: True

    @property
    def rows(self) -> int:
        return len(self.token_ids)


# Called exactly once with a proposal's outcome; None: it was cancelled, and nobody is to be told.
Answer = Callable[[BlockDrafted | ProposalRefused | None], None]
