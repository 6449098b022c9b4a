"""OpenAI's response objects, made from ours."""

from __future__ import annotations

import json
from typing import Any

from flashduet import __version__
from flashduet.errors import FlashduetError, InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from gateway.router import ServedModel

_FINGERPRINT = f"flashduet-{__version__}"
_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


class ChatCompletionWriter:
    """Writes one chat completion, whole or in chunks that all bear the same id and time."""

    def __init__(self, started: pb.GenerateStarted, created: int) -> None:
        self.completion_id = f"chatcmpl-{started.request_id.removeprefix('req-')}"
        self._common = {
            "id": self.completion_id,
            "created": created,
            "model": started.model,
            "system_fingerprint": _FINGERPRINT,
        }

    def completion(self, text: str, complete: pb.GenerateComplete) -> dict[str, Any]:
        """The `chat.completion` object of a whole answer."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[complete.finish_reason],
        }
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(complete.usage),
        }

    def opening(self, *, with_usage: bool) -> str:
        """The first chunk, which says whose words follow."""
        return self._chunk({"role": "assistant", "content": ""}, None, with_usage)

    def text(self, text: str, *, with_usage: bool) -> str:
        return self._chunk({"content": text}, None, with_usage)

    def closing(self, complete: pb.GenerateComplete, *, with_usage: bool) -> str:
        """The last chunk of the choice, which says why it ended."""
        return self._chunk({}, _FINISH_REASONS[complete.finish_reason], with_usage)

    def usage(self, complete: pb.GenerateComplete) -> str:
        """The chunk without choices that ends a stream for which usage was asked."""
        return json.dumps(
            {
                **self._common,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": usage(complete.usage),
            }
        )

    def _chunk(self, delta: dict[str, str], finish_reason: str | None, with_usage: bool) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._common, "object": "chat.completion.chunk", "choices": [choice]}
        if with_usage:
            chunk["usage"] = None
        return json.dumps(chunk)


def usage(counted: pb.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
    }


def model(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "flashduet",
    }


def error(failure: FlashduetError) -> dict[str, Any]:
    """OpenAI's error object; `param` is the field as the client wrote it."""
    param = code = None
    if isinstance(failure, InvalidRequest):
        param = failure.field.removeprefix("sampling.")
        code = "model_not_found" if param == "model" else "invalid_value"
    message = failure.message.replace("sampling.", "", 1) if param else failure.message
    return {
        "error": {"message": message, "type": failure.openai_type, "param": param, "code": code}
    }
