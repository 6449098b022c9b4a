"""OpenAI's completion request, translated into ours: one of ours for each of its prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flashduet.errors import InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from gateway.http.fields import MAX_LOGPROBS, REFUSED, AnswerRequest, Integer, TokenId
from gateway.http.generate import sampling_and_options
from gateway.tokenization import GenerationDefaults

# OpenAI's own, for a request that does not say.
DEFAULT_MAX_TOKENS = 16

_Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Prompt = (
    str
    | Annotated[list[str], Field(fail_fast=True, min_length=1)]
    | _Ids
    | Annotated[list[_Ids], Field(fail_fast=True, min_length=1)]
)


class CompletionRequest(AnswerRequest):
    """POST /v1/completions."""

    prompt: Prompt = Field(description="A text, token ids, or a list of either.")
    echo: bool | None = Field(default=None, description="Not together with logprobs.")
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    suffix: Literal[""] | None = Field(default=None, description=REFUSED)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


def to_generates(
    request: CompletionRequest, defaults: GenerationDefaults, request_id: str, max_prompts: int
) -> list[pb.GenerateRequest]:
    """The same request in our own words, still to be checked against the model's limits.

    Raises:
        InvalidRequest: too many prompts, or fields that contradict each other.
    """
    if request.echo and request.logprobs is not None:
        raise InvalidRequest(
            "echo", True, "cannot go with logprobs: those of the prompt are not computed"
        )
    prompts = request.prompts
    if len(prompts) > max_prompts:
        raise InvalidRequest("prompt", f"{len(prompts)} prompts", f"at most {max_prompts}")
    common = pb.GenerateRequest(
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        request_id=request_id,
        echo=bool(request.echo),
        top_logprobs=request.logprobs,
    )
    sampling_and_options(common, request, defaults)
    return [_with_prompt(common, prompt) for prompt in prompts]


def _with_prompt(common: pb.GenerateRequest, prompt: str | list[int]) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    message.CopyFrom(common)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message
