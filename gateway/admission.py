"""Checks every field of a request against its limit, and refuses it by name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashduet.errors import InvalidRequest
from flashduet.sampling.params import Sampling
from flashduet.v1 import gateway_pb2 as pb
from gateway.request import Speculation, SpeculationMode, ValidRequest
from gateway.router import ServedModel
from gateway.settings import GatewaySettings
from gateway.tokenization import ChatTurn, Tokenizer

ROLES = ("system", "user", "assistant")
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 1024
MAX_REQUEST_ID_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """The gateway's own limits and defaults, beside the model's."""

    max_tokens: int | None
    default_max_tokens: int | None
    speculation: Speculation

    @classmethod
    def of(cls, settings: GatewaySettings) -> Limits:
        return cls(
            max_tokens=settings.max_tokens_limit,
            default_max_tokens=settings.default_max_tokens,
            speculation=Speculation(SpeculationMode(settings.speculation), settings.block_length),
        )

    def most_tokens(self, served: ServedModel) -> int:
        """Most tokens that any request may ask for."""
        return min(self.max_tokens or served.context_window, served.context_window)


async def admit(
    message: pb.GenerateRequest, served: ServedModel, tokenizer: Tokenizer, limits: Limits
) -> ValidRequest:
    """The request, checked and tokenized.

    Raises:
        InvalidRequest: names the field, its value and its limit.
    """
    # What costs nothing to check comes before tokenizing.
    if message.HasField("model") and message.model != served.name:
        raise InvalidRequest("model", message.model, f"served is {served.name!r}")
    sampling = Sampling.from_proto(message.sampling)
    if not message.sampling.HasField("seed"):
        sampling = replace(sampling, seed=secrets.randbits(64))
    request_id = _request_id(message)
    stops = _stops(message.stop)
    stop_ids = _stop_ids(message.stop_token_ids, served.vocab_size)
    if not message.ignore_eos:
        stop_ids |= tokenizer.end_ids
    speculation = _speculation(message, served, limits)
    _check_max_tokens(message, served, limits)
    field, prompt_ids = await _prompt(message, served, tokenizer)
    return ValidRequest(
        request_id=request_id,
        model=served.name,
        prompt_ids=prompt_ids,
        max_tokens=_max_tokens(message, field, len(prompt_ids), served, limits),
        sampling=sampling,
        speculation=speculation,
        stops=stops,
        stop_ids=stop_ids,
        include_special_tokens=message.include_special_tokens,
    )


async def _prompt(
    message: pb.GenerateRequest, served: ServedModel, tokenizer: Tokenizer
) -> tuple[str, tuple[int, ...]]:
    """The field that holds the prompt, and its ids."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        _check_characters("text", len(message.text), served, tokenizer)
        return "text", _some("text", await tokenizer.encode_text(message.text))
    if kind == "chat":
        turns = _turns(message.chat.messages)
        _check_characters("messages", sum(len(t.content) for t in turns), served, tokenizer)
        return "messages", _some("messages", await tokenizer.encode_chat(turns))
    if kind == "token_ids":
        ids = message.token_ids.ids
        if len(ids) and max(ids) >= served.vocab_size:
            raise InvalidRequest("token_ids", max(ids), f"must be below {served.vocab_size}")
        return "token_ids", _some("token_ids", ids)
    raise InvalidRequest("prompt", "nothing", "one of text, chat and token_ids must be given")


def _some(field: str, ids: Sequence[int]) -> tuple[int, ...]:
    if not len(ids):
        raise InvalidRequest(field, "no tokens", "must hold at least one token")
    return tuple(ids)


def _turns(messages: Sequence[pb.ChatMessage]) -> list[ChatTurn]:
    if not messages:
        raise InvalidRequest("messages", [], "must hold at least one message")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role", message.role, f"must be one of {', '.join(ROLES)}"
            )
    return [ChatTurn(message.role, message.content) for message in messages]


def _check_characters(
    field: str, characters: int, served: ServedModel, tokenizer: Tokenizer
) -> None:
    """Refuse what cannot fit before spending seconds on tokenizing it."""
    most = served.context_window * tokenizer.longest_token
    if characters > most:
        raise InvalidRequest(
            field,
            f"{characters} characters",
            f"at most {most} can fit the context window of {served.context_window} tokens",
        )


def _check_max_tokens(message: pb.GenerateRequest, served: ServedModel, limits: Limits) -> None:
    if not message.HasField("max_tokens"):
        return
    most = limits.most_tokens(served)
    if not 1 <= message.max_tokens <= most:
        raise InvalidRequest("max_tokens", message.max_tokens, f"must be from 1 to {most}")


def _max_tokens(
    message: pb.GenerateRequest, field: str, prompt: int, served: ServedModel, limits: Limits
) -> int:
    window = served.context_window
    left = window - prompt
    if left < 1:
        raise InvalidRequest(
            field,
            f"{prompt} tokens",
            f"must leave room for an answer in the context window of {window} tokens",
        )
    if not message.HasField("max_tokens"):
        return min(left, limits.default_max_tokens or left, limits.most_tokens(served))
    if message.max_tokens > left:
        raise InvalidRequest(
            "max_tokens",
            message.max_tokens,
            f"a prompt of {prompt} tokens leaves {left} in the context window of {window}",
        )
    return message.max_tokens


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    for stop in stops:
        if not stop or len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "stop", stop, f"each must have 1 to {MAX_STOP_CHARACTERS} characters"
            )
    return tuple(dict.fromkeys(stops))


def _stop_ids(stop_ids: Sequence[int], vocab_size: int) -> frozenset[int]:
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidRequest("stop_token_ids", f"{len(stop_ids)} ids", f"at most {MAX_STOP_IDS}")
    found = frozenset(stop_ids)
    if found and max(found) >= vocab_size:
        raise InvalidRequest("stop_token_ids", max(found), f"must be below {vocab_size}")
    return found


def _request_id(message: pb.GenerateRequest) -> str:
    if not message.HasField("request_id"):
        return f"req-{secrets.token_hex(16)}"
    given = message.request_id
    # It goes into headers and logs as it is.
    if not (
        0 < len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
    ):
        raise InvalidRequest(
            "request_id",
            given,
            f"must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters",
        )
    return given


def _speculation(message: pb.GenerateRequest, served: ServedModel, limits: Limits) -> Speculation:
    asked = message.speculation
    modes = {
        pb.SPECULATION_MODE_UNSPECIFIED: limits.speculation.mode,
        pb.SPECULATION_MODE_AUTO: SpeculationMode.AUTO,
        pb.SPECULATION_MODE_FIXED: SpeculationMode.FIXED,
        pb.SPECULATION_MODE_OFF: SpeculationMode.OFF,
    }
    if asked.mode not in modes:
        raise InvalidRequest("speculation.mode", asked.mode, "must be AUTO, FIXED or OFF")
    mode = modes[asked.mode]
    if not asked.HasField("block_length"):
        return Speculation(mode, limits.speculation.block_length)
    if not 1 <= asked.block_length <= served.max_block_length:
        raise InvalidRequest(
            "speculation.block_length",
            asked.block_length,
            f"must be from 1 (plain steps) to {served.max_block_length}",
        )
    return Speculation(mode, asked.block_length)
