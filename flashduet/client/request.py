"""What a caller asks for, and its form on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

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
    seed: int | None
    # The answer ends before the first of these strings, or at one of these ids.
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # "fixed" when only a block_length is given, else the gateway's default.
    speculation: SpeculationMode | None
    # Anchor and draft tokens; without one, "fixed" takes what the drafter was trained for.
    block_length: int | None
    model: str | None
    # A string prompt is taken as it is, without the chat template.
    raw: bool
    include_special_tokens: bool
    request_id: str | None
    # Seconds for the whole call; DEFAULT_TIMEOUT_S when absent.
    timeout: float


def build_request(prompt: Prompt, options: GenerateOptions) -> gateway_pb2.GenerateRequest:
    """The request's wire form; limits are checked by the gateway, which knows them.

    Raises:
        TypeError: the prompt is none of the kinds of `Prompt`, a keyword is unknown, or two
            exclude each other.
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
    )
    if isinstance(prompt, str):
        if options.get("raw", False):
            request.text = prompt
        else:
            request.chat.messages.add(role="user", content=prompt)
        return request
    messages = [item for item in prompt if isinstance(item, Message)]
    ids = [item for item in prompt if isinstance(item, int) and not isinstance(item, bool)]
    if len(messages) == len(prompt):
        # Also the empty sequence: the gateway refuses it by the field's name.
        request.chat.SetInParent()
        for message in messages:
            request.chat.messages.add(role=message.role, content=message.content)
    elif len(ids) == len(prompt):
        request.token_ids.ids.extend(ids)
    else:
        raise TypeError("prompt: a string, a sequence of Message or a sequence of token ids")
    return request


def _sampling(options: GenerateOptions) -> common_pb2.SamplingParams:
    sampling = options.get("sampling")
    if sampling is None:
        return common_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            min_p=options.get("min_p"),
            seed=options.get("seed"),
        )
    single = ("temperature", "top_p", "top_k", "min_p", "seed")
    if any(options.get(name) is not None for name in single):
        raise TypeError(f"give either sampling or {', '.join(single)}")
    return sampling.to_proto()


def _speculation(options: GenerateOptions) -> gateway_pb2.Speculation:
    mode, block_length = options.get("speculation"), options.get("block_length")
    if mode is None and block_length is not None:
        mode = "fixed"
    if mode is None:
        return gateway_pb2.Speculation()
    if mode not in _MODES:
        raise TypeError(f"speculation: one of {', '.join(_MODES)}, not {mode!r}")
    return gateway_pb2.Speculation(mode=_MODES[mode], block_length=block_length)
