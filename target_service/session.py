"""One sequence's state on the target, and the work that advances it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flashduet.kv.blocks import BlockTable
from flashduet.sampling.history import TokenHistory
from flashduet.sampling.params import Sampling
from flashduet.sampling.position_logprobs import PositionLogprobs


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """Changed by the engine alone, between the arrival of a message and its answer.

    Invariant between rounds: the table holds every committed token but the last, the anchor.
    """

    session_id: bytes
    epoch: int
    # Index among a request's answers; part of the noise key.
    choice: int
    sampling: Sampling
    # Positions 0..token_limit-1 may be computed.
    token_limit: int
    prompt_length: int
    # Committed tokens by position, the anchor included.
    token_ids: list[int] = field(default_factory=list)
    # Blocks of keys and values: reserved by the scheduler before a step, filled by the engine.
    table: BlockTable = field(default_factory=BlockTable)
    # Positions before this need no features: the draft holds them, or they were sent already.
    draft_context_hit: int = 0
    # How many of the most likely tokens to tell with each chosen one; None for no logprobs at all.
    top_logprobs: int | None = None
    # Keys and values may be shared with sessions of the same key.
    cache_key: bytes = b""
    # Takes what interactive sessions leave.
    batch: bool = False
    # Committed tokens as penalties count them; None where the sampling has no use for it.
    history: TokenHistory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.sampling.needs_history:
            self.history = TokenHistory(self.prompt_length, self.token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append chosen tokens."""
        self.token_ids.extend(token_ids)
        if self.history is not None:
            self.history.extend(token_ids)

    @property
    def committed_length(self) -> int:
        return len(self.token_ids)

    @property
    def anchor_position(self) -> int:
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute committed tokens for positions base.. ; `last` asks for the token after them."""

    session: Session
    token_ids: Sequence[int]
    base: int
    last: bool
    # Layers whose states are wanted back, in order; empty for none.
    layer_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyBlock:
    """Compute the anchor (at `base`) and draft tokens for base+1.. in one causal pass."""

    session: Session
    base: int
    token_ids: Sequence[int]
    layer_ids: tuple[int, ...] = ()


WorkItem = PrefillChunk | VerifyBlock


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Features of committed positions base.. : [len(token_ids), layers * hidden]."""

    base: int
    token_ids: tuple[int, ...]
    features: Tensor


@dataclass(frozen=True, slots=True)
class Interval:
    """When something happened: wall clock start and a duration of the steady clock."""

    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of one work item.

    Attributes:
        committed: tokens added to the sequence: none for an inner chunk, the first token for the
            last one, accepted drafts and the bonus for a block.
        accepted: draft tokens that the target agreed with.
        rows: positions computed.
        context: features of the rows that are committed for good, less those that the draft needs
            no more; None when there are none, or none were asked for.
        forward, sample: of the whole step, which all its items share.
        logprobs: of each committed token, for a session that asks for them.
    """

    committed: tuple[int, ...]
    accepted: int
    rows: int
    context: ContextRows | None
    forward: Interval
    sample: Interval
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The item could not be computed; its session is as it was before."""

    error: Exception
