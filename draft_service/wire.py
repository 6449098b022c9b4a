"""Between messages and the coordinator's own types. No decisions are made here."""

from __future__ import annotations

import time

from opentelemetry.context import Context

from draft_service.messages import BlockDrafted, BlockRequest
from draft_service.refusals import ChunkRefused, ProposalRefused
from draft_service.sessions import SessionTerms
from flashduet.errors import InvalidRequest
from flashduet.sampling.params import Sampling
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2

ID_BYTES = 16


def require_session_id(session_id: bytes) -> None:
    """Raises ProposalRefused (BAD_REQUEST) unless it has 16 bytes."""
    if len(session_id) != ID_BYTES:
        raise ProposalRefused("BAD_REQUEST", f"session_id must have {ID_BYTES} bytes")


def block_request(message: draft_pb2.ProposeBlock, trace: Context | None) -> BlockRequest:
    """The proposal wanted, as arrived now; `trace` is the context of the span that covers it."""
    return BlockRequest(
        message.round,
        message.committed_length,
        message.anchor_token_id,
        message.block_length,
        message.budget_us,
        now_ns(),
        trace,
    )


def session_terms(message: draft_pb2.ProposeOpen) -> SessionTerms:
    """Raises ProposalRefused (BAD_REQUEST) naming the field."""
    if len(message.target_instance_id) != ID_BYTES:
        raise ProposalRefused("BAD_REQUEST", f"target_instance_id must have {ID_BYTES} bytes")
    try:
        sampling = Sampling.from_proto(message.sampling)
    except InvalidRequest as error:
        raise ProposalRefused("BAD_REQUEST", error.message) from error
    return SessionTerms(
        message.choice,
        message.target_instance_id,
        sampling,
        message.prompt_length,
        message.cache_salt,
        message.drafter_only,
    )


def facts_key(facts: pb.ModelFacts) -> bytes:
    """What says that two targets compute the same features for the same tokens."""
    return facts.SerializeToString(deterministic=True)


def proposal(round: int, drafted: BlockDrafted) -> draft_pb2.Proposal:
    times = drafted.times
    return draft_pb2.Proposal(
        round=round,
        token_ids=drafted.drafts.token_ids,
        confidence=drafted.drafts.confidence,
        copied_tokens=drafted.drafts.copied,
        timings=pb.PhaseTimings(
            context_wait_us=_us(drafted.arrived_ns, drafted.context_ns),
            queue_us=_us(drafted.context_ns, times.start_ns),
            forward_us=_us(times.start_ns, times.forwarded_ns),
            sample_us=_us(times.forwarded_ns, times.sampled_ns),
        ),
    )


def refused(round: int, refusal: ProposalRefused) -> draft_pb2.ProposeRefused:
    return draft_pb2.ProposeRefused(
        reason=f"REFUSAL_REASON_{refusal.reason}",
        round=round,
        context_end=refusal.context_end,
        detail=refusal.detail,
    )


def nack(chunk: draft_pb2.IngestChunk, refusal: ChunkRefused) -> draft_pb2.IngestNack:
    return draft_pb2.IngestNack(
        sequence=chunk.sequence,
        session_id=chunk.session_id,
        epoch=chunk.epoch,
        reason=f"NACK_REASON_{refusal.reason}",
        have=refusal.have,
    )


def outcome_name(outcome: BlockDrafted | ProposalRefused | None) -> str:
    """For a span's attribute: `drafted`, `cancelled`, or the refusal's reason."""
    if outcome is None:
        return "cancelled"
    return outcome.reason if isinstance(outcome, ProposalRefused) else "drafted"


def now_ns() -> int:
    return time.time_ns()


def _us(start_ns: int, end_ns: int) -> int:
    """A wall clock may be set back between the two."""
    return max(0, end_ns - start_ns) // 1000
