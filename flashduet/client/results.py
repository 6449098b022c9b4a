"""What comes back, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flashduet.errors import FlashduetError
from flashduet.v1 import gateway_pb2

FinishReason = Literal["stop", "length"]

_FINISH_REASONS: Mapping[int, FinishReason] = {
    gateway_pb2.FINISH_REASON_STOP: "stop",
    gateway_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of the answer; `text` is empty while a character or stop string is incomplete."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request; `cached_tokens` of the prompt needed no computing."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What drafting did for one request.

    `acceptance_length` is τ: tokens committed a round, bonus included, after stop and budget,
    without the prefill's token. `phases` are seconds by name, "verify.forward" within "verify".
    `undrafted_rounds` counts plain steps by their reason.
    """

    rounds: int
    drafted_rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float
    phases: Mapping[str, float]
    undrafted_rounds: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    `seconds` run from the call to its end and `first_token_seconds` to the first chunk with
    tokens, both as the client saw them. `trace_id` is hex, empty when the request is not traced.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: TokenUsage
    speculation: SpeculationReport
    request_id: str
    model: str
    seed: int
    trace_id: str
    stop_string: str | None
    stop_token_id: int | None
    seconds: float
    first_token_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens over the whole call, prefill included."""
        return self.usage.completion_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that the gateway serves; lengths in tokens, `drafter` empty when none is reachable.

    `created` is in seconds since the epoch.
    """

    id: str
    context_window: int
    max_tokens: int
    drafter: str
    block_length: int
    created: int


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """Requests of a gateway: now, the most there may be, and since its start by their end."""

    active_requests: int
    max_requests: int
    completed_requests: int
    failed_requests: int
    cancelled_requests: int
    draft_available: bool


class Collector:
    """Gathers one stream's messages: Started, chunks, and the Complete that ends it.

    Shared by the sync and the async client, which differ only in how messages arrive.
    """

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._first_token_at: float | None = None
        self._started: gateway_pb2.GenerateStarted | None = None
        self._complete: gateway_pb2.GenerateComplete | None = None
        self._ended_at = started_at
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def add(self, message: gateway_pb2.GenerateResponse, now: float) -> TextChunk | None:
        """Take one message; a TextChunk is returned where it is one."""
        kind = message.WhichOneof("message")
        if kind == "started":
            self._started = message.started
        elif kind == "complete":
            self._complete, self._ended_at = message.complete, now
        elif kind == "chunk":
            chunk = TextChunk(message.chunk.text, list(message.chunk.token_ids))
            if chunk.token_ids and self._first_token_at is None:
                self._first_token_at = now
            self._texts.append(chunk.text)
            self._token_ids.extend(chunk.token_ids)
            return chunk
        return None

    def generation(self) -> Generation:
        """The whole answer.

        Raises:
            FlashduetError: the stream ended before its Complete.
        """
        if self._started is None or self._complete is None:
            raise FlashduetError("the gateway's stream ended before the answer was complete")
        started, complete = self._started, self._complete
        reason = _FINISH_REASONS.get(complete.finish_reason)
        if reason is None:
            raise FlashduetError(f"the gateway gave finish reason {complete.finish_reason}")
        first_token_at = self._first_token_at or self._ended_at
        return Generation(
            text="".join(self._texts),
            token_ids=list(self._token_ids),
            finish_reason=reason,
            usage=TokenUsage(
                complete.usage.prompt_tokens,
                complete.usage.completion_tokens,
                complete.usage.cached_tokens,
            ),
            speculation=_report(complete.speculation),
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            trace_id=started.trace_id,
            stop_string=complete.stop_string if complete.HasField("stop_string") else None,
            stop_token_id=complete.stop_token_id if complete.HasField("stop_token_id") else None,
            seconds=self._ended_at - self._started_at,
            first_token_seconds=first_token_at - self._started_at,
        )


def model_cards(response: gateway_pb2.ListModelsResponse) -> list[ModelCard]:
    return [
        ModelCard(
            id=model.id,
            context_window=model.context_window,
            max_tokens=model.max_tokens,
            drafter=model.drafter,
            block_length=model.block_length,
            created=model.created,
        )
        for model in response.models
    ]


def gateway_load(response: gateway_pb2.GatewayServiceGetLoadResponse) -> GatewayLoad:
    return GatewayLoad(
        active_requests=response.active_requests,
        max_requests=response.max_requests,
        completed_requests=response.completed_requests,
        failed_requests=response.failed_requests,
        cancelled_requests=response.cancelled_requests,
        draft_available=response.draft_available,
    )


def _report(stats: gateway_pb2.SpeculationStats) -> SpeculationReport:
    return SpeculationReport(
        rounds=stats.rounds,
        drafted_rounds=stats.drafted_rounds,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        acceptance_length=stats.acceptance_length,
        phases={item.phase: item.seconds for item in stats.phases},
        undrafted_rounds={item.reason: item.count for item in stats.undrafted_rounds},
    )
