"""The spans of the draft service: just these, with the right parents, and always ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flashduet import telemetry
from flashduet.v1 import draft_pb2 as dp
from tests.unit.draft_running import Running, running

__all__ = ["running"]

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_provider", provider)
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


async def test_a_proposal_and_a_chunk_leave_just_these_spans(
    spans: InMemorySpanExporter, running: Running
) -> None:
    target, gateway, session = await running.target(), running.gateway(), os.urandom(16)
    gateway.traceparent = target.traceparent = f"00-{TRACE}-{PARENT}-01"
    await gateway.open(session, target, epoch=3)
    await target.chunk(session, 0, running.features(9), epoch=3)
    await gateway.propose(session, 10, epoch=3, round=6)
    found = by_name(spans)
    assert {name: len(each) for name, each in found.items()} == {
        "draft.propose": 1,
        "draft.queue": 1,
        "draft.forward": 1,
        "draft.sample": 1,
        "draft.ingest": 1,
    }
    assert all(format(s.context.trace_id, "032x") == TRACE for s in spans.get_finished_spans())
    propose, ingest = found["draft.propose"][0], found["draft.ingest"][0]
    for top in (propose, ingest):
        assert top.parent is not None
        assert format(top.parent.span_id, "016x") == PARENT
    for phase in ("draft.queue", "draft.forward", "draft.sample"):
        span = found[phase][0]
        assert span.parent is not None
        assert span.parent.span_id == propose.context.span_id
        assert propose.start_time <= span.start_time <= span.end_time <= propose.end_time
    assert dict(propose.attributes or {}) == {
        "session": session.hex(),
        "epoch": 3,
        "round": 6,
        "base": 9,
        "tokens": 8,
        "outcome": "drafted",
    }
    assert dict(ingest.attributes or {}) == {
        "session": session.hex(),
        "epoch": 3,
        "base": 0,
        "rows": 9,
        "transport": "inline",
    }


async def test_every_proposals_span_ends_however_it_goes(
    spans: InMemorySpanExporter, running: Running
) -> None:
    target, gateway, session = await running.target(), running.gateway(), os.urandom(16)
    gateway.traceparent = f"00-{TRACE}-{PARENT}-01"
    await gateway.open(session, target)
    await gateway.ask(session, 9, round=1)
    await gateway.send(session, cancel=dp.ProposeCancel(round=1))
    await gateway.propose(session, 9, round=2, budget_s=0.05)
    await gateway.propose(session, 9, epoch=7)
    await gateway.ask(session, 9, round=3)
    while not (await running.load()).queued_proposals:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await gateway.end()
    await running.emptied()
    outcomes = [(s.attributes or {})["outcome"] for s in by_name(spans)["draft.propose"]]
    assert outcomes == ["cancelled", "CONTEXT_LATE", "WRONG_EPOCH", "UNKNOWN_SESSION"]


async def test_untraced_messages_leave_no_spans(
    spans: InMemorySpanExporter, running: Running
) -> None:
    target, gateway, session = await running.target(), running.gateway(), os.urandom(16)
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(9))
    await gateway.propose(session, 10)
    assert spans.get_finished_spans() == ()


@pytest.mark.parametrize("running", [{"lookup": 3}], indirect=True)
async def test_a_proposal_tells_how_much_of_it_is_copied(
    spans: InMemorySpanExporter, running: Running
) -> None:
    target, gateway, session = await running.target(), running.gateway(), os.urandom(16)
    gateway.traceparent = f"00-{TRACE}-{PARENT}-01"
    await gateway.open(session, target)
    text = [11, 12, 13, 14, 15, 11, 12]
    await target.chunk(session, 0, running.features(7), token_ids=text)
    for anchor in (13, 99):
        await gateway.propose(session, 8, anchor=anchor, block_length=4)
    facts = [dict(span.attributes or {}) for span in by_name(spans)["draft.sample"]]
    assert facts == [{"tokens": 3, "copied_tokens": 3}, {"tokens": 3, "copied_tokens": 0}]
