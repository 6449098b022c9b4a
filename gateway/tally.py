"""Where an answer's time goes, told twice: as spans of its trace and as sums in its statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from flashduet import telemetry
from flashduet.v1.common_pb2 import PhaseTimings, ReasonCount
from flashduet.v1.gateway_pb2 import PhaseSeconds, SpeculationStats
from flashduet.v1.target_pb2 import DecodeOpened, DecodeVerified
from gateway.draft_session import Proposal


class Phase:
    """A span of time within a request, used as a context manager.

    Costs two clock readings where the request is not traced. `seconds` is known once it is over;
    `traceparent` goes with the messages sent meanwhile.
    """

    __slots__ = (
        "_context",
        "_counted",
        "_name",
        "_parent",
        "_span",
        "_started",
        "_tally",
        "seconds",
    )

    def __init__(
        self,
        tally: Tally,
        name: str,
        parent: Context | None,
        *,
        counted: bool = True,
        within: Context | None = None,
    ) -> None:
        """
        Args:
            tally: takes its seconds.
            name: of the span.
            parent: of the span; None where the request is not traced.
            counted: part of the sums; spans that only hold others are not.
            within: a span that is open already, for a phase that is never entered itself.
        """
        self._tally = tally
        self._name = name
        self._counted = counted
        self._parent = parent
        self._span: Span | None = None
        self._context = within
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> Self:
        if self._parent is not None:
            self._span = telemetry.tracer().start_span(self._name, context=self._parent)
            self._context = trace.set_span_in_context(self._span, Context())
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        if self._counted:
            self._tally.add(self._name, self.seconds)
        if self._span is not None:
            if kind is not None:
                self._span.set_status(Status(StatusCode.ERROR, kind.__name__))
            self._span.end()

    def phase(self, name: str) -> Phase:
        """A phase inside this one."""
        return Phase(self._tally, name, self._context)

    def group(self, name: str) -> Phase:
        """A span inside this one that only holds others."""
        return Phase(self._tally, name, self._context, counted=False)

    def counted_by(self, tally: Tally) -> Phase:
        """The same span, as a place for phases that count in another tally."""
        return Phase(tally, self._name, self._parent, within=self._context)

    def note(self, **attributes: AttributeValue) -> None:
        """Put facts on the span."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    @property
    def traceparent(self) -> str:
        return telemetry.traceparent(self._context) if self._context is not None else ""

    @property
    def trace_id(self) -> str:
        return telemetry.trace_id(self._context)


class Tally:
    """One answer's sums: seconds by phase, rounds, tokens drafted and accepted."""

    def __init__(self) -> None:
        self.cached_tokens = 0
        self.rounds = 0
        self.drafted_rounds = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.copied_tokens = 0
        self.accepted_copied_tokens = 0
        self._seconds: dict[str, float] = {}
        self._undrafted: dict[str, int] = {}

    def request(self, traceparent: str | None) -> Phase:
        """The root of the request's trace, below the client's own span if it sent one; None for a
        request that is nobody's, and leaves no trace in any process."""
        traced = traceparent is not None and telemetry.enabled()
        parent = (telemetry.context_of(traceparent or "") or Context()) if traced else None
        return Phase(self, "flashduet.request", parent, counted=False)

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def count_prefill(self, opened: DecodeOpened) -> None:
        self.cached_tokens = opened.cached_tokens
        self._target_spent("prefill", opened.timings)

    def draft_spent(self, timings: PhaseTimings) -> None:
        """Add what the draft says about the inside of a proposal."""
        self.add("propose.queue", timings.queue_us / 1e6)
        self.add("propose.context_wait", timings.context_wait_us / 1e6)
        self.add("propose.forward", timings.forward_us / 1e6)
        self.add("propose.sample", timings.sample_us / 1e6)

    def count_round(self, proposal: Proposal, verified: DecodeVerified, *, committed: int) -> None:
        """Add a round, of which `committed` tokens were kept (after stop and budget).

        Plain steps that followed it are rounds of their own, of a token each.
        """
        if proposal.token_ids:
            self.rounds += 1
            self.drafted_rounds += 1
            drafted, accepted = len(proposal.token_ids), min(verified.accepted, committed)
            own = drafted - proposal.copied_tokens
            self.drafted_tokens += drafted
            self.accepted_tokens += accepted
            self.copied_tokens += proposal.copied_tokens
            self.accepted_copied_tokens += max(0, accepted - own)
        else:
            self.rounds += committed
            reason = proposal.undrafted
            self._undrafted[reason] = self._undrafted.get(reason, 0) + committed
        self._target_spent("verify", verified.timings)

    def include(self, others: Sequence[Tally]) -> None:
        """Add the sums of a request's answers to its own."""
        for other in others:
            self.rounds += other.rounds
            self.drafted_rounds += other.drafted_rounds
            self.drafted_tokens += other.drafted_tokens
            self.accepted_tokens += other.accepted_tokens
            self.copied_tokens += other.copied_tokens
            self.accepted_copied_tokens += other.accepted_copied_tokens
            for phase, seconds in other._seconds.items():
                self.add(phase, seconds)
            for reason, count in other._undrafted.items():
                self._undrafted[reason] = self._undrafted.get(reason, 0) + count
        # The one that found the least had to compute the rest for all.
        self.cached_tokens = min((other.cached_tokens for other in others), default=0)

    def stats(self, later_tokens: int) -> SpeculationStats:
        """As the client gets it; `later_tokens` are those after each answer's first."""
        return SpeculationStats(
            rounds=self.rounds,
            drafted_rounds=self.drafted_rounds,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            copied_tokens=self.copied_tokens,
            accepted_copied_tokens=self.accepted_copied_tokens,
            acceptance_length=later_tokens / self.rounds if self.rounds else 0.0,
            phases=[
                PhaseSeconds(phase=name, seconds=seconds)
                for name, seconds in sorted(self._seconds.items())
            ],
            undrafted_rounds=[
                ReasonCount(reason=reason, count=count)
                for reason, count in sorted(self._undrafted.items())
            ],
        )

    def _target_spent(self, phase: str, timings: PhaseTimings) -> None:
        self.add(f"{phase}.queue", timings.queue_us / 1e6)
        self.add(f"{phase}.forward", timings.forward_us / 1e6)
        self.add(f"{phase}.sample", timings.sample_us / 1e6)
        self.add(f"{phase}.publish", timings.publish_us / 1e6)
