"""One request is one trace with exactly the spans that were agreed on, and their parents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flashduet import telemetry
from gateway.metrics import GatewayMetrics
from tests.unit.toy_model import ids_of
from tests.unit.toy_stack import ToyStack, ask

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")
CLIENT_SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What `telemetry.setup` installs, with an exporter that can be read."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_provider", provider)
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def shape(spans: InMemorySpanExporter) -> Counter[tuple[str, str]]:
    """How often each span occurs below which parent."""
    finished = spans.get_finished_spans()
    names = {span.context.span_id: span.name for span in finished}
    return Counter((names.get(span.parent.span_id, "?") if span.parent else "", span.name)
                   for span in finished)  # fmt: skip


def one(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [span for span in spans.get_finished_spans() if span.name == name]
    return found


async def test_the_exact_spans_of_a_request(stack: ToyStack, spans: InMemorySpanExporter) -> None:
    stack.draft.wrong_every = 1000
    answer = await stack.generate(ask(PROMPT, max_tokens=18))
    assert answer.stats.rounds == 3  # 8 and 8 drafted, 1 plain
    assert shape(spans) == {
        ("", "flashduet.request"): 1,
        ("flashduet.request", "admit"): 1,
        ("flashduet.request", "prefill"): 1,
        ("flashduet.request", "round"): 3,
        ("round", "propose"): 2,
        ("round", "verify"): 3,
        ("round", "accept"): 3,
    }
    assert len({span.context.trace_id for span in spans.get_finished_spans()}) == 1
    assert answer.started.trace_id == format(one(spans, "admit").context.trace_id, "032x")


async def test_rounds_say_what_happened_in_them(
    stack: ToyStack, spans: InMemorySpanExporter
) -> None:
    await stack.generate(ask(PROMPT, max_tokens=9))
    rounds = [span for span in spans.get_finished_spans() if span.name == "round"]
    for index, span in enumerate(rounds):
        assert span.attributes["round"] == index + 1
    assert rounds[0].attributes["base"] == len(PROMPT)
    assert rounds[0].attributes["tokens"] == 7
    assert 0 <= rounds[0].attributes["accepted"] <= 7
    root = one(spans, "flashduet.request")
    assert root.attributes["session"] == stack.target.openings[0].session_id.hex()


async def test_messages_carry_the_span_that_waits_for_them(
    stack: ToyStack, spans: InMemorySpanExporter
) -> None:
    await stack.generate(ask(PROMPT, max_tokens=9))
    sent = [header.split("-")[2] for header in stack.target.traceparents if header]
    waiting = [span for span in spans.get_finished_spans() if span.name in ("prefill", "verify")]
    assert sent == [format(span.context.span_id, "016x") for span in waiting]


async def test_a_clients_trace_goes_on(stack: ToyStack, spans: InMemorySpanExporter) -> None:
    metadata = (("traceparent", CLIENT_SPAN),)
    answer = await stack.generate(ask(PROMPT, max_tokens=2), metadata=metadata)
    assert answer.started.trace_id == CLIENT_SPAN.split("-")[1]
    assert (
        format(one(spans, "flashduet.request").parent.span_id, "016x") == CLIENT_SPAN.split("-")[2]
    )


async def test_what_the_gateway_asks_itself_is_in_no_trace_and_no_figure(
    stack: ToyStack, spans: InMemorySpanExporter
) -> None:
    metrics = GatewayMetrics(stack.gateway)
    route = stack.router.route(drafted=True)
    assert route is not None
    complete = await stack.gateway.ask_itself(ask(PROMPT, max_tokens=18), route, 60)
    assert complete.speculation.drafted_rounds
    assert not spans.get_finished_spans()
    assert set(stack.target.traceparents) == {""}, "nor do the services record anything of it"
    assert set(stack.draft.traceparents) == {""}
    counted = [
        line
        for line in metrics.render().decode().splitlines()
        if line.startswith("flashduet_gateway_") and "_limit" not in line and "_build" not in line
    ]
    assert {line for line in counted if not line.endswith(" 0.0")} == {
        "flashduet_gateway_serving 1.0",
        "flashduet_gateway_drafting 1.0",
    }


async def test_a_failed_phase_ends_as_an_error(
    stack: ToyStack, spans: InMemorySpanExporter
) -> None:
    stack.target.dies_at = 1
    with pytest.raises(Exception, match="gone"):
        await stack.generate(ask(PROMPT))
    for name in ("verify", "round", "flashduet.request"):
        assert not one(spans, name).status.is_ok
    assert one(spans, "prefill").status.is_unset


async def test_without_exporters_nothing_is_traced(stack: ToyStack) -> None:
    answer = await stack.generate(ask(PROMPT, max_tokens=3))
    assert answer.started.trace_id == ""
    assert set(stack.target.traceparents) == {""}
