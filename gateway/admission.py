"""Checks every field of a request against its limit, and refuses it by name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashduet.errors import ContextTooLong, InvalidRequest, UnknownModel
from flashduet.sampling.params import Sampling
from flashduet.v1 import common_pb2 as pb_common
from flashduet.v1 import gateway_pb2 as pb
from gateway.prompt import echo, prompt
from gateway.request import Priority, Speculation, SpeculationMode, ValidRequest
from gateway.router import ServedModel
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenizer

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 1024
MAX_REQUEST_ID_CHARACTERS = 128
MAX_CACHE_SALT_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The gateway's own limits and defaults, beside the model's."""

    max_tokens: int | None
    default_max_tokens: int | None
    speculation: Speculation
    most_choices: int = 1

    @classmethod
    def of(cls, settings: GatewaySettings) -> Limits:
        return cls(
            max_tokens=settings.max_tokens_limit,
            default_max_tokens=settings.default_max_tokens,
            speculation=Speculation(SpeculationMode(settings.speculation), settings.block_length),
            most_choices=settings.most_choices,
        )

    def most_tokens(self, served: ServedModel) -> int:
        """Most tokens that any request may ask for."""
        return min(self.max_tokens or served.context_window, served.context_window)


def choices(message: pb.GenerateRequest, limits: Limits) -> int:
    """How many answers are wanted.

    Raises:
        InvalidRequest: more than are allowed, or none.
    """
    if not message.HasField("n"):
        return 1
    if not 1 <= message.n <= limits.most_choices:
        raise InvalidRequest("n", message.n, f"must be from 1 to {limits.most_choices}")
    return message.n


def priority(message: pb.GenerateRequest) -> Priority:
    """Which class the request belongs to.

    Raises:
        InvalidRequest: a class that does not exist.
    """
    if message.priority in (pb_common.PRIORITY_UNSPECIFIED, pb_common.PRIORITY_INTERACTIVE):
        return Priority.INTERACTIVE
    if message.priority == pb_common.PRIORITY_BATCH:
        return Priority.BATCH
    raise InvalidRequest("priority", message.priority, "must be INTERACTIVE or BATCH")


async def admit(
    message: pb.GenerateRequest, served: ServedModel, tokenizer: Tokenizer, limits: Limits
) -> ValidRequest:
    """The request, checked and tokenized.

    Raises:
        InvalidRequest: names the field, its value and its limit.
    """
    # What costs nothing to check comes before tokenizing.
    if message.HasField("model") and message.model != served.name:
        raise UnknownModel(message.model, served.name)
    sampling = Sampling.from_proto(message.sampling)
    sampling.check_vocabulary(served.vocab_size)
    if not message.sampling.HasField("seed"):
        sampling = replace(sampling, seed=secrets.randbits(64))
    request_id = _request_id(message)
    stops = _stops(message.stop)
    stop_ids = _stop_ids(message.stop_token_ids, served.vocab_size)
    if not message.ignore_eos:
        stop_ids |= tokenizer.end_ids
    top_logprobs = _top_logprobs(message, served)
    if len(message.cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        raise InvalidRequest(
            "cache_salt", message.cache_salt, f"at most {MAX_CACHE_SALT_CHARACTERS} characters"
        )
    speculation = _speculation(message, served, limits)
    _check_max_tokens(message, served, limits)
    field, prompt_ids = await prompt(message, served, tokenizer)
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
        choices=choices(message, limits),
        top_logprobs=top_logprobs,
        priority=priority(message),
        cache_salt=message.cache_salt,
        echo=echo(message, prompt_ids, tokenizer),
    )


def _top_logprobs(message: pb.GenerateRequest, served: ServedModel) -> int | None:
    if not message.HasField("top_logprobs"):
        return None
    most = min(served.max_top_logprobs, MAX_TOP_LOGPROBS)
    if not most:
        raise InvalidRequest("top_logprobs", message.top_logprobs, "the target tells none")
    if message.top_logprobs > most:
        raise InvalidRequest("top_logprobs", message.top_logprobs, f"must be from 0 to {most}")
    return message.top_logprobs


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
        raise ContextTooLong(
            field,
            f"{prompt} tokens",
            f"must leave room for an answer in the context window of {window} tokens",
        )
    if not message.HasField("max_tokens"):
        return min(left, limits.default_max_tokens or left, limits.most_tokens(served))
    if message.max_tokens > left:
        raise ContextTooLong(
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
        return Speculation(mode, limits.speculation.block_length, asked.drafter_only)
    if not 1 <= asked.block_length <= served.max_block_length:
        raise InvalidRequest(
            "speculation.block_length",
            asked.block_length,
            f"must be from 1 (plain steps) to {served.max_block_length}",
        )
    return Speculation(mode, asked.block_length, asked.drafter_only)
