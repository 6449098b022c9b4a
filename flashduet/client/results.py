"""What comes back, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flashduet.v1 import gateway_pb2

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability under the raw model.

    `token` are the bytes that it stands for, perhaps a part of a character.
    """

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """One position of an answer: the token chosen, and the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of an answer; `text` is empty while a character or stop string is incomplete.

    Attributes:
        choice: index of the answer, below n.
        logprobs: one a token, if `top_logprobs` was given.
        finish_reason: set in the last piece of each answer, which has neither text nor tokens.
    """

    text: str
    token_ids: list[int]
    choice: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer; `stop_string` or `stop_token_id` is what ended it, if one did."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request, all answers together; `cached_tokens` of the prompt were found again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What drafting did for one request, all answers together.

    `acceptance_length` is τ: tokens committed a round, bonus included, after stop and budget,
    without the prefill's token. `phases` are seconds by name, "verify.forward" within "verify".
    `undrafted_rounds` counts plain steps by their reason. `copied_tokens` and
    `accepted_copied_tokens` are those of the drafted and the accepted ones that were copied from
    the text.
    """

    rounds: int
    drafted_rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float
    phases: Mapping[str, float]
    undrafted_rounds: Mapping[str, int]
    copied_tokens: int = 0
    accepted_copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A request's finished answers; `text`, `token_ids`, `finish_reason`, `stop_*` are the first's.

    `seconds` run from the call to its end and `first_token_seconds` to the first chunk with
    tokens, both as the client saw them. `trace_id` is hex, empty when the request is not traced.
    """

    choices: tuple[Choice, ...]
    usage: TokenUsage
    speculation: SpeculationReport
    request_id: str
    model: str
    seed: int
    trace_id: str
    seconds: float
    first_token_seconds: float

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop_string(self) -> str | None:
        return self.choices[0].stop_string

    @property
    def stop_token_id(self) -> int | None:
        return self.choices[0].stop_token_id

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return self.choices[0].logprobs

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
    """Answers under way and the most there may be, of each of which a request for n choices is n;
    requests since the gateway's start by their end, of which it is one."""

    active_requests: int
    max_requests: int
    completed_requests: int
    failed_requests: int
    cancelled_requests: int
    draft_available: bool


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
