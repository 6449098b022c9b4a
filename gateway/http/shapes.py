"""The objects that answers are made of, as OpenAI's clients read them; ours beside theirs.

Answers are written from these models, and /openapi.json shows them, so that what is documented and
what is sent are the same. A field that was not set is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


class Shape(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(Shape):
    cached_tokens: int = Field(description="Whose keys and values were found again.")


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class FlashduetStats(Shape):
    """How the answers came about, all choices together."""

    rounds: int
    drafted_rounds: int = Field(description="Rounds that had draft tokens to verify.")
    drafted_tokens: int
    accepted_tokens: int
    copied_tokens: int = Field(description="Drafted tokens that were copied from the text.")
    accepted_copied_tokens: int = Field(description="Those of them that were accepted.")
    acceptance_length: float = Field(
        description="Tokens committed a round, the target's own included, the first token not."
    )
    undrafted_rounds: dict[str, int] = Field(description="Rounds without a proposal, by reason.")
    seconds: dict[str, float] = Field(description="Spent in each phase.")
    seeds: list[int] = Field(description="Of each prompt.")
    trace_id: str | None = Field(description="Of the first prompt; null when it is not traced.")


class MetaInfo(Shape):
    """What SGLang tells of an answer, under its names."""

    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    spec_verify_ct: int
    spec_accept_length: float | None = None


Choice = TypeVar("Choice", bound=Shape)


class Answer(Shape, Generic[Choice]):
    """What whole answers and pieces of streams share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | None = None
    flashduet: FlashduetStats | None = None
    meta_info: MetaInfo | None = None


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer[ChatChoice]):
    object: Literal["chat.completion"]


class ChatDelta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Answer[ChatChunkChoice]):
    object: Literal["chat.completion.chunk"]


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Answer[CompletionChoice]):
    """Also each piece of a stream."""

    object: Literal["text_completion"]


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Prompt and answer together, in tokens.")
    drafter: str | None
    block_length: int | None


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Shape):
    prompt: str


class Status(Shape):
    status: Literal["ok", "unavailable"]


class ErrorBody(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    error: ErrorBody


def json_response(
    shape: Shape, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(shape.json_text(), status, headers, media_type="application/json")
