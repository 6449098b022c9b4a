"""OpenAI's chat completion request, translated into ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from flashduet.errors import InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from gateway.http.fields import (
    EXTENSION,
    HARMLESS,
    MAX_LOGPROBS,
    REFUSED,
    UINT32,
    AnswerRequest,
    Integer,
    Strict,
)
from gateway.http.generate import sampling_and_options
from gateway.tokenization import GenerationDefaults

# Levels of nesting in a chat template's variables.
_LEVELS = 32


class TextPart(Strict):
    type: Literal["text"]
    text: str


class RequestMessage(Strict):
    """One turn of a chat. A developer is what OpenAI now calls who was the system."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]


class _TextFormat(Strict):
    type: Literal["text"]


class ChatCompletionRequest(AnswerRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[RequestMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[Integer, Field(ge=1, le=UINT32)] | None = Field(
        default=None, description="Wins over max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        default=None, description="Only together with logprobs."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description=f"{EXTENSION} More variables for the model's chat template."
    )

    parallel_tool_calls: Any = Field(default=None, description=HARMLESS)
    # Predicted outputs make answers quicker, not different.
    prediction: Any = Field(default=None, description=HARMLESS)

    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(
        default=None, description=REFUSED
    )
    tool_choice: Literal["none", "auto"] | None = Field(default=None, description=REFUSED)
    functions: Annotated[list[Any], Field(max_length=0)] | None = Field(
        default=None, description=REFUSED
    )
    function_call: Literal["none", "auto"] | None = Field(default=None, description=REFUSED)
    response_format: _TextFormat | None = Field(default=None, description=REFUSED)
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = Field(
        default=None, description=REFUSED
    )
    audio: None = Field(default=None, description=REFUSED)
    web_search_options: None = Field(default=None, description=REFUSED)
    reasoning_effort: None = Field(default=None, description=REFUSED)
    verbosity: Literal["medium"] | None = Field(default=None, description=REFUSED)
    echo: Literal[False] | None = Field(default=None, description=REFUSED)


def to_generate(
    request: ChatCompletionRequest, defaults: GenerationDefaults, request_id: str
) -> pb.GenerateRequest:
    """The same request in our own words, still to be checked against the model's limits.

    Raises:
        InvalidRequest: fields that contradict each other.
    """
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs", request.top_logprobs, "needs logprobs to be true")
    message = pb.GenerateRequest(
        max_tokens=request.max_completion_tokens or request.max_tokens, request_id=request_id
    )
    if request.logprobs:
        message.top_logprobs = request.top_logprobs or 0
    chat(message, request.messages, request.chat_template_kwargs)
    sampling_and_options(message, request, defaults)
    return message


def chat(
    message: pb.GenerateRequest, turns: Sequence[RequestMessage], kwargs: dict[str, Any] | None
) -> None:
    """Make the chat the message's prompt.

    Raises:
        InvalidRequest: a variable for the template that cannot be carried.
    """
    for turn in turns:
        content = turn.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if turn.role == "developer" else turn.role
        message.chat.messages.add(role=role, content=content)
    if not _carried(kwargs):
        raise InvalidRequest(
            "chat_template_kwargs", kwargs, f"numbers must be finite, and at most {_LEVELS} levels"
        )
    message.chat.template_kwargs.update(kwargs or {})


def _carried(value: Any, levels: int = _LEVELS) -> bool:
    """Whether a Struct can hold it, whose numbers are doubles and which is read by recursion."""
    if not levels:
        return False
    if isinstance(value, dict):
        return all(_carried(item, levels - 1) for item in value.values())
    if isinstance(value, list):
        return all(_carried(item, levels - 1) for item in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        # A reader of JSON makes infinity of 1e999.
        return abs(value) <= sys.float_info.max
    return True
