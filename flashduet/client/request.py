"""What a caller asks for, and its form on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from flashduet.sampling.params import Sampling
from flashduet.v1 import common_pb2, gateway_pb2

# The gateway frees everything at this deadline; a caller who wants more says so.
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


# A question to a chat model, a conversation, or token ids that are taken as they are.
Prompt = str | Sequence[Message] | Sequence[int]


# Batch requests take what interactive ones leave.
Priority = Literal["interactive", "batch"]

_PRIORITIES: Mapping[Priority, common_pb2.Priority] = {
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "batch": common_pb2.PRIORITY_BATCH,
}

# `auto` leaves block lengths to the gateway, `fixed` uses one in every round, `off` drafts nothing.
SpeculationMode = Literal["auto", "fixed", "off"]

_MODES: Mapping[SpeculationMode, gateway_pb2.SpeculationMode] = {
    "auto": gateway_pb2.SPECULATION_MODE_AUTO,
    "fixed": gateway_pb2.SPECULATION_MODE_FIXED,
    "off": gateway_pb2.SPECULATION_MODE_OFF,
}


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate`; an absent one, or None, is left to the gateway's default.

    `sampling` and the single sampling fields exclude each other: with `sampling` every field is
    sent, its seed too, while without a `seed` the gateway draws one (see `Generation.seed`).
    """

    max_tokens: int | None
    sampling: Sampling | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    # Added to the logits of token ids.
    logit_bias: Mapping[int, float] | None
    seed: int | None
    # Answers to the one prompt.
    n: int | None
    # So many of the most likely tokens are told with each chosen one; 0 tells that one alone.
    top_logprobs: int | None
    # The answer ends before the first of these strings, or at one of these ids.
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # "fixed" when only a block_length is given, else the gateway's default.
    speculation: SpeculationMode | None
    # Anchor and draft tokens; without one, "fixed" takes what the drafter was trained for.
    block_length: int | None
    # Nothing is copied from the text, so that the drafter alone is measured.
    drafter_only: bool
    model: str | None
    # A string prompt is taken as it is, without the chat template.
    raw: bool
    include_special_tokens: bool
    # The first chunk of each answer begins with the prompt's text.
    echo: bool
    # More variables for the chat template, e.g. {"enable_thinking": False}.
    template_kwargs: Mapping[str, Any] | None
    priority: Priority | None
    # Work on a common prefix is shared only between requests of the same salt.
    cache_salt: str
    request_id: str | None
    # Seconds for the whole call; DEFAULT_TIMEOUT_S when absent.
    timeout: float


def build_request(prompt: Prompt, options: GenerateOptions) -> gateway_pb2.GenerateRequest:
    """The request's wire form; limits are checked by the gateway, which knows them.

    Raises:
        TypeError: the prompt is none of the kinds of `Prompt`, a keyword is unknown or has a value
            of the wrong kind, or two exclude each other.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"generate has no keyword {', '.join(sorted(unknown))}")
    request = gateway_pb2.GenerateRequest(
        model=options.get("model"),
        max_tokens=options.get("max_tokens"),
        sampling=_sampling(options),
        stop=options.get("stop", ()),
        stop_token_ids=options.get("stop_token_ids", ()),
        ignore_eos=options.get("ignore_eos", False),
        speculation=_speculation(options),
        request_id=options.get("request_id"),
        include_special_tokens=options.get("include_special_tokens", False),
        n=options.get("n"),
        top_logprobs=options.get("top_logprobs"),
        priority=_priority(options),
        cache_salt=options.get("cache_salt", ""),
        echo=options.get("echo", False),
    )
    _set_prompt(request, prompt, options)
    return request


def _set_prompt(
    request: gateway_pb2.GenerateRequest, prompt: Prompt, options: GenerateOptions
) -> None:
    if isinstance(prompt, str):
        if options.get("raw", False):
            request.text = prompt
        else:
            _set_chat(request.chat, [Message("user", prompt)], options)
        return
    messages = [item for item in prompt if isinstance(item, Message)]
    ids = [item for item in prompt if isinstance(item, int) and not isinstance(item, bool)]
    if len(messages) == len(prompt):
        # Also the empty sequence: the gateway refuses it by the field's name.
        request.chat.SetInParent()
        _set_chat(request.chat, messages, options)
    elif len(ids) == len(prompt):
        request.token_ids.ids.extend(ids)
    else:
        raise TypeError("prompt: a string, a sequence of Message or a sequence of token ids")


def _set_chat(
    chat: gateway_pb2.ChatMessages, messages: Sequence[Message], options: GenerateOptions
) -> None:
    for message in messages:
        chat.messages.add(role=message.role, content=message.content)
    if (variables := options.get("template_kwargs")) is not None:
        try:
            chat.template_kwargs.update(variables)
        except (ValueError, TypeError) as error:
            raise TypeError(f"template_kwargs: values as in JSON are wanted ({error})") from error


def _priority(options: GenerateOptions) -> common_pb2.Priority:
    priority = options.get("priority")
    if priority is None:
        return common_pb2.PRIORITY_UNSPECIFIED
    if priority not in _PRIORITIES:
        raise TypeError(f"priority: one of {', '.join(_PRIORITIES)}, not {priority!r}")
    return _PRIORITIES[priority]


_SINGLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
)


def _sampling(options: GenerateOptions) -> common_pb2.SamplingParams:
    sampling = options.get("sampling")
    if sampling is None:
        return common_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            min_p=options.get("min_p"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            repetition_penalty=options.get("repetition_penalty"),
            logit_bias=options.get("logit_bias") or {},
            seed=options.get("seed"),
        )
    if any(options.get(name) is not None for name in _SINGLE):
        raise TypeError(f"give either sampling or {', '.join(_SINGLE)}")
    return sampling.to_proto()


def _speculation(options: GenerateOptions) -> gateway_pb2.Speculation:
    mode, block_length = options.get("speculation"), options.get("block_length")
    if mode is None and block_length is not None:
        mode = "fixed"
    if mode is not None and mode not in _MODES:
        raise TypeError(f"speculation: one of {', '.join(_MODES)}, not {mode!r}")
    return gateway_pb2.Speculation(
        mode=None if mode is None else _MODES[mode],
        block_length=block_length,
        drafter_only=options.get("drafter_only", False),
    )
