"""The target's spans and timings; the spans' names are part of the interface."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from flashduet import telemetry
from flashduet.v1 import common_pb2
from target_service.job import Outcome
from target_service.session import Interval


class MessageSpan:
    """From a message's arrival to its answer; does nothing where the request is not traced."""

    def __init__(
        self, name: str, traceparent: str, attributes: Mapping[str, AttributeValue]
    ) -> None:
        self._span: trace.Span | None = None
        self._context: Context | None = None
        parent = telemetry.context_of(traceparent)
        if parent is not None:
            self._span = telemetry.tracer().start_span(name, parent, attributes=attributes)
            self._context = trace.set_span_in_context(self._span, Context())

    @property
    def traceparent(self) -> str:
        """For messages that belong to this span; empty when there is none."""
        return telemetry.traceparent(self._context)

    def record(self, outcome: Outcome) -> None:
        """Add the engine's phases as children, and what the message came to."""
        if self._span is None:
            return
        self._span.set_attribute("accepted", outcome.accepted)
        for phase in outcome.phases:
            telemetry.record_span(
                f"target.{phase.name}",
                self._context,
                phase.interval.start_ns,
                phase.interval.end_ns,
                {"rows": phase.rows},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        if kind is not None:
            self._span.set_status(trace.StatusCode.ERROR, kind.__name__)
        self._span.end()


def trace_publish(traceparent: str, interval: Interval, rows: int) -> None:
    """Record that features were handed over; it happens after the answer of their message."""
    telemetry.record_span(
        "target.publish",
        telemetry.context_of(traceparent),
        interval.start_ns,
        interval.end_ns,
        {"rows": rows},
    )


def phase_timings(outcome: Outcome) -> common_pb2.PhaseTimings:
    """Microseconds of each phase, summed over chunks; publishing is of the chunks before."""
    total = dict.fromkeys(("queue", "forward", "sample"), 0)
    for phase in outcome.phases:
        total[phase.name] += phase.interval.duration_ns
    return common_pb2.PhaseTimings(
        queue_us=total["queue"] // 1000,
        forward_us=total["forward"] // 1000,
        sample_us=total["sample"] // 1000,
        publish_us=outcome.published_ns // 1000,
    )


def add_timings(total: common_pb2.PhaseTimings, more: common_pb2.PhaseTimings) -> None:
    """Add the timings of a step to those of the steps before it."""
    total.queue_us += more.queue_us
    total.forward_us += more.forward_us
    total.sample_us += more.sample_us
    total.publish_us += more.publish_us
