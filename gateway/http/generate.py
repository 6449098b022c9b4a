"""The part of a request that chat completions and completions translate alike.

Sampling fields that are absent take the value that the served checkpoint's generation_config.json
states, and else OpenAI's own defaults: temperature 1, top_p 1. (Over gRPC absent means greedy.)
"""

from __future__ import annotations

from typing import Any

from flashduet.errors import InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.common_pb2 import PRIORITY_BATCH, PRIORITY_INTERACTIVE
from gateway.http.fields import UINT32, AnswerRequest
from gateway.tokenization import GenerationDefaults

_MODES = {
    "auto": pb.SPECULATION_MODE_AUTO,
    "fixed": pb.SPECULATION_MODE_FIXED,
    "off": pb.SPECULATION_MODE_OFF,
}
_PRIORITIES = {"interactive": PRIORITY_INTERACTIVE, "batch": PRIORITY_BATCH}
# OpenAI's tier for work that may wait.
_WAITING_TIER = "flex"


def sampling_and_options(
    message: pb.GenerateRequest, request: AnswerRequest, defaults: GenerationDefaults
) -> None:
    """Put everything into `message` but the prompt, the length and what is told of tokens.

    Raises:
        InvalidRequest: a token id of the bias is none, or options of a stream are for no stream.
    """
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "options", "needs stream to be true")
    message.model = request.model
    message.stop.extend(request.stops)
    message.stop_token_ids.extend(request.stop_token_ids or [])
    message.ignore_eos = bool(request.ignore_eos)
    message.include_special_tokens = request.skip_special_tokens is False
    message.cache_salt = request.cache_salt or ""
    if request.n is not None:
        message.n = request.n
    if request.priority is not None:
        message.priority = _PRIORITIES[request.priority]
    elif request.service_tier == _WAITING_TIER:
        message.priority = PRIORITY_BATCH
    _sampling(message, request, defaults)
    if request.speculation is not None:
        if request.speculation.mode is not None:
            message.speculation.mode = _MODES[request.speculation.mode]
        if request.speculation.block_length is not None:
            message.speculation.block_length = request.speculation.block_length
        message.speculation.drafter_only = bool(request.speculation.drafter_only)


def _sampling(
    message: pb.GenerateRequest, request: AnswerRequest, defaults: GenerationDefaults
) -> None:
    sampling = message.sampling
    sampling.temperature = _first(request.temperature, defaults.temperature, 1.0)
    sampling.top_p = _first(request.top_p, defaults.top_p, 1.0)
    sampling.top_k = max(_first(request.top_k, defaults.top_k, 0), 0)
    sampling.min_p = _first(request.min_p, defaults.min_p, 0.0)
    if request.seed is not None:
        sampling.seed = request.seed % 2**64
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (value := getattr(request, name)) is not None:
            setattr(sampling, name, value)
    for token_id, bias in (request.logit_bias or {}).items():
        if int(token_id) > UINT32:
            raise InvalidRequest("logit_bias", token_id, "must be a token id of the model")
        sampling.logit_bias[int(token_id)] = bias


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
