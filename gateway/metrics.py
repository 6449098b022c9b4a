"""Figures of a gateway's requests, over HTTP and gRPC together, for Prometheus.

Labels are of small fixed sets: no model, path, address, key or text is ever among them.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from flashduet import __version__
from flashduet.v1 import gateway_pb2 as pb
from gateway.gateway import Gateway
from gateway.outcome import RequestEnd

CONTENT_TYPE = CONTENT_TYPE_LATEST
# A second series beside each counter, which nobody reads.
disable_created_metrics()

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)
_QUEUE_SECONDS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_LENGTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class GatewayMetrics:
    """Counts every request of one gateway when it is over."""

    def __init__(self, gateway: Gateway) -> None:
        registry = self._registry = CollectorRegistry()
        gateway.observers.append(self._count)

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"flashduet_gateway_{name}", help_, labels, registry=registry)

        def histogram(name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"flashduet_gateway_{name}", help_, buckets=buckets, registry=registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(f"flashduet_gateway_{name}", help_, registry=registry)

        self._requests = counter(
            "requests",
            "Requests that are over: completed, cancelled, or by the status of their error.",
            "outcome",
        )
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter("cached_tokens", "Those of them that were found again.")
        self._answer_tokens = counter("completion_tokens", "Tokens answered.")
        self._rounds = counter("rounds", "Verifications by the target.")
        self._undrafted = counter("undrafted_rounds", "Rounds without a proposal.", "reason")
        self._drafted = counter("drafted_tokens", "Draft tokens that were verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens that the target agreed with.")
        self._copied = counter("copied_tokens", "Draft tokens that were copied from the text.")
        self._accepted_copied = counter(
            "accepted_copied_tokens", "Those of them that the target agreed with."
        )
        self._phases = counter("phase_seconds", "Time spent in the phases of requests.", "phase")
        self._first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival.", _SECONDS
        )
        self._between_tokens = histogram(
            "time_between_tokens_seconds",
            "Mean of each request: from its first to its last token, by the tokens of one answer.",
            _TOKEN_SECONDS,
        )
        self._queue = histogram(
            "queue_seconds", "That a request's prompt waited for the target.", _QUEUE_SECONDS
        )
        self._whole = histogram("request_seconds", "From arrival to end, if completed.", _SECONDS)
        self._length = histogram(
            "acceptance_length",
            "Mean of each request: tokens committed a round, the target's own included.",
            _LENGTHS,
        )
        gauge("answers_active", "Answers under way.").set_function(lambda: gateway.counts.active)
        gauge("answers_limit", "Answers that may be under way; more are refused.").set(
            gateway.max_requests
        )
        gauge("serving", "Whether a target serves.").set_function(
            lambda: gateway.served() is not None
        )
        gauge("drafting", "Whether a drafter is attached to it.").set_function(
            lambda: bool((served := gateway.served()) and served.drafter)
        )
        Info("flashduet_gateway_build", "What runs here.", registry=registry).info(
            {"version": __version__}
        )
        ProcessCollector(registry=registry)

    def render(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def _count(self, end: RequestEnd) -> None:
        outcome = end.outcome if end.error is None else end.error.grpc_status.lower()
        self._requests.labels(outcome).inc()
        if end.started is not None:
            self._prompt_tokens.inc(end.started.prompt_tokens)
        if end.first_token_s is not None:
            self._first_token.observe(end.first_token_s)
        if end.complete is not None:
            self._whole.observe(end.seconds)
            self._count_answer(end.complete, end.seconds - (end.first_token_s or 0.0))

    def _count_answer(self, complete: pb.GenerateComplete, seconds: float) -> None:
        """`seconds`: since the first token."""
        usage, stats = complete.usage, complete.speculation
        self._cached_tokens.inc(usage.cached_tokens)
        self._answer_tokens.inc(usage.completion_tokens)
        self._rounds.inc(stats.rounds)
        self._drafted.inc(stats.drafted_tokens)
        self._accepted.inc(stats.accepted_tokens)
        self._copied.inc(stats.copied_tokens)
        self._accepted_copied.inc(stats.accepted_copied_tokens)
        for item in stats.undrafted_rounds:
            self._undrafted.labels(item.reason).inc(item.count)
        for phase in stats.phases:
            if phase.phase == "prefill.queue":
                self._queue.observe(phase.seconds)
            self._phases.labels(phase.phase).inc(phase.seconds)
        if stats.rounds:
            self._length.observe(stats.acceptance_length)
            # Several answers are made at the same time, each of them with a first token of its own.
            later = stats.acceptance_length * stats.rounds
            answers = max(1, round(usage.completion_tokens - later))
            self._between_tokens.observe(seconds * answers / later if later else seconds)
