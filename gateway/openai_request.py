"""OpenAI's chat completion request, translated into ours or refused by the name of a field.

A field that would change the output and that we do not have is refused unless it holds the value
that means "not used". Fields that cannot change the output are accepted and ignored. Everything
else is unknown and refused, since an option that is silently ignored is a wrong answer.

Sampling fields that are absent take the value that the served checkpoint's generation_config.json
states, and else OpenAI's own defaults: temperature 1, top_p 1. (Over gRPC absent means greedy.)
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashduet.errors import InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from gateway.tokenization import GenerationDefaults

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        # Predicted outputs make answers quicker, not different.
        "prediction",
    }
)

# Each with the values that mean that it is not used; null always does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
}

_MODES = {
    "auto": pb.SPECULATION_MODE_AUTO,
    "fixed": pb.SPECULATION_MODE_FIXED,
    "off": pb.SPECULATION_MODE_OFF,
}
_UINT32 = 2**32 - 1
_MOST_LEVELS = 64


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: str
    content: str | list[_TextPart]


class _StreamOptions(_Strict):
    include_usage: bool = False
    # Padding against traffic analysis, which a local server has no use for.
    include_obfuscation: bool = False


class _Speculation(_Strict):
    """Our own: how the request is drafted. It never changes the answer."""

    mode: Literal["auto", "fixed", "off"] = "auto"
    block_length: Annotated[int, Field(ge=1, le=_UINT32)] | None = None


class ChatCompletionRequest(_Strict):
    """The fields that are used, under OpenAI's names; the last four are common extensions."""

    model: str
    messages: list[_Message]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_UINT32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_UINT32)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    # OpenAI's seeds are signed; a negative one stands for its 64-bit pattern.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    # -1 is what other servers call 0: keep all.
    top_k: Annotated[int, Field(ge=-1, le=_UINT32)] | None = None
    min_p: float | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=_UINT32)]] | None = None
    ignore_eos: bool = False
    speculation: _Speculation | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def parse(body: object) -> ChatCompletionRequest:
    """Check the shape of a request's JSON.

    Raises:
        InvalidRequest: names the field, its value and what is allowed.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body", type(body).__name__, "must be a JSON object")
    given = {name: value for name, value in _without_nulls(body).items() if name not in HARMLESS}
    for name, unused in UNSUPPORTED.items():
        if name in given and (value := given.pop(name)) not in unused:
            raise InvalidRequest(name, value, "is not supported; leave it out")
    try:
        request = ChatCompletionRequest.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", given["stream_options"], "needs stream to be true")
    return request


def to_generate(
    request: ChatCompletionRequest, defaults: GenerationDefaults, request_id: str | None
) -> pb.GenerateRequest:
    """The same request in our own words, still to be checked against the model's limits.

    Raises:
        InvalidRequest: a text is not valid Unicode.
    """
    message = pb.GenerateRequest(
        model=_text("model", request.model),
        stop=[_text("stop", stop) for stop in _stops(request.stop)],
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=request.ignore_eos,
        request_id=request_id,
        max_tokens=request.max_completion_tokens or request.max_tokens,
    )
    for index, turn in enumerate(request.messages):
        content = turn.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        # OpenAI's newer name for the same role.
        role = "system" if turn.role == "developer" else turn.role
        message.chat.messages.add(
            role=_text(f"messages[{index}].role", role),
            content=_text(f"messages[{index}].content", content),
        )
    if not request.messages:
        message.chat.SetInParent()
    _sampling(message, request, defaults)
    if request.speculation is not None:
        message.speculation.mode = _MODES[request.speculation.mode]
        if request.speculation.block_length is not None:
            message.speculation.block_length = request.speculation.block_length
    return message


def _sampling(
    message: pb.GenerateRequest, request: ChatCompletionRequest, defaults: GenerationDefaults
) -> None:
    sampling = message.sampling
    sampling.temperature = _first(request.temperature, defaults.temperature, 1.0)
    sampling.top_p = _first(request.top_p, defaults.top_p, 1.0)
    sampling.top_k = max(_first(request.top_k, defaults.top_k, 0), 0)
    sampling.min_p = _first(request.min_p, defaults.min_p, 0.0)
    if request.seed is not None:
        sampling.seed = request.seed % 2**64


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _stops(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _text(field: str, value: str) -> str:
    """JSON can hold half a surrogate pair, which no tokenizer and no protobuf takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, ascii(value), "must be valid Unicode") from error
    return value


def _without_nulls(value: Any, depth: int = 0) -> Any:
    """Null is "not given" everywhere in OpenAI's API, also in messages that clients echo.

    Raises:
        InvalidRequest: deeper than any request is; what follows walks it by recursion too.
    """
    if depth > _MOST_LEVELS:
        raise InvalidRequest("body", "deeply nested JSON", f"at most {_MOST_LEVELS} levels")
    if isinstance(value, dict):
        return {
            key: _without_nulls(item, depth + 1) for key, item in value.items() if item is not None
        }
    if isinstance(value, list):
        return [_without_nulls(item, depth + 1) for item in value]
    return value


def _refusal(error: ValidationError) -> InvalidRequest:
    # Where a field may be one of two things, the one that was understood furthest is meant.
    first = max(error.errors(), key=lambda item: len(item["loc"]))
    field = ""
    for part in first["loc"]:
        # Pydantic names the branches of such a field too; its path has none of them.
        if isinstance(part, int):
            field += f"[{part}]"
        elif part.isidentifier() and part != "str":
            field += f".{part}" if field else part
    if first["type"] == "missing":
        return InvalidRequest(field, "nothing", "is required")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(field, first["input"], "is not known; leave it out")
    return InvalidRequest(field, first["input"], first["msg"][0].lower() + first["msg"][1:])
