"""The draft service's spans; their names are part of the interface (a test asserts the set)."""

from __future__ import annotations

from opentelemetry.context import Context

from draft_service.messages import BlockDrafted, ChunkArrived
from flashduet import telemetry


def record_ingest(chunk: ChunkArrived, end_ns: int) -> None:
    """From a chunk's arrival until its rows are in the context."""
    if chunk.trace is None:
        return
    attributes: dict[str, str | int] = {
        "session": chunk.session_id.hex(),
        "epoch": chunk.epoch,
        "base": chunk.base,
        "rows": chunk.rows,
        "transport": chunk.transport,
    }
    telemetry.record_span("draft.ingest", chunk.trace, chunk.arrived_ns, end_ns, attributes)


def record_phases(result: BlockDrafted, parent: Context | None) -> None:
    """A proposal's phases; the wait for context is part of the queue."""
    if parent is None:
        return
    times = result.times
    telemetry.record_span("draft.queue", parent, result.arrived_ns, times.start_ns)
    telemetry.record_span("draft.forward", parent, times.start_ns, times.forwarded_ns)
    tokens = {"tokens": len(result.drafts.token_ids), "copied_tokens": result.drafts.copied}
    telemetry.record_span("draft.sample", parent, times.forwarded_ns, times.sampled_ns, tokens)
