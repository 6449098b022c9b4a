"""What an OpenAI client gets of an answer, whole or streamed, held against the SDK's own models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

# Ours, beside OpenAI's.
EXTENSIONS = {"flashduet", "meta_info"}


@dataclass
class Choice:
    """One answer: what it says, in pieces put together."""

    text: str = ""
    finish_reason: str | None = None
    # Chat completions tell bytes, in hex here, completions text.
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


@dataclass
class Seen:
    """All answers to a request, and what was told of them."""

    choices: list[Choice]
    usage: dict[str, Any] | None
    stats: dict[str, Any]
    meta_info: dict[str, Any] | None

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]


def validated(model: type[BaseModel], body: dict[str, Any]) -> Any:
    """The body as the SDK's model, which must know every field of it but our extensions."""
    found = model.model_validate(body, strict=True)
    assert unknown(found) <= EXTENSIONS, unknown(found)
    return found


def unknown(found: Any, path: str = "") -> set[str]:
    """Fields that a model of the SDK has no name for, by their paths."""
    if isinstance(found, list):
        return {name for item in found for name in unknown(item, path)}
    if not isinstance(found, BaseModel):
        return set()
    names = {f"{path}{name}" for name in found.model_extra or {}}
    for name in type(found).model_fields:
        names |= unknown(getattr(found, name), f"{path}{name}.")
    return names


def whole_chat(body: dict[str, Any]) -> Seen:
    """A whole chat completion."""
    validated(ChatCompletion, body)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    made: dict[int, Choice] = defaultdict(Choice)
    for choice in body["choices"]:
        assert choice["message"]["role"] == "assistant"
        _add(made[choice["index"]], choice, choice["message"]["content"], _chat_logprobs)
    return _seen(made, body, [body["usage"]])


def streamed_chat(pieces: Sequence[dict[str, Any]]) -> Seen:
    """The chunks of a chat completion."""
    made: dict[int, Choice] = defaultdict(Choice)
    for body in pieces:
        validated(ChatCompletionChunk, body)
        assert body["object"] == "chat.completion.chunk"
        for choice in body["choices"]:
            # The first piece of a choice, and only that one, says whose words follow.
            assert (choice["delta"].get("role") == "assistant") == (choice["index"] not in made)
            text = choice["delta"].get("content") or ""
            _add(made[choice["index"]], choice, text, _chat_logprobs)
    return _of_pieces(made, pieces)


def whole_completion(body: dict[str, Any]) -> Seen:
    """A whole completion."""
    validated(Completion, body)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    made: dict[int, Choice] = defaultdict(Choice)
    for choice in body["choices"]:
        _add(made[choice["index"]], choice, choice["text"], _logprobs)
    return _seen(made, body, [body["usage"]])


def streamed_completion(pieces: Sequence[dict[str, Any]]) -> Seen:
    """The pieces of a completion."""
    made: dict[int, Choice] = defaultdict(Choice)
    for body in pieces:
        # The SDK's model wants a reason in every piece, though OpenAI gives it in the last alone.
        ended = [{**choice, "finish_reason": "stop"} for choice in body["choices"]]
        validated(Completion, {**body, "choices": ended})
        assert body["object"] == "text_completion"
        for choice in body["choices"]:
            _add(made[choice["index"]], choice, choice["text"], _logprobs)
    return _of_pieces(made, pieces)


def _add(
    made: Choice,
    choice: dict[str, Any],
    text: str,
    add_logprobs: Callable[[Choice, dict[str, Any]], None],
) -> None:
    assert made.finish_reason is None, "a piece after the last"
    made.text += text
    made.finish_reason = choice["finish_reason"]
    if choice["logprobs"] is not None:
        add_logprobs(made, choice["logprobs"])


def _chat_logprobs(made: Choice, logprobs: dict[str, Any]) -> None:
    for token in logprobs["content"]:
        made.tokens.append(bytes(token["bytes"]).hex())
        made.logprobs.append(token["logprob"])
        made.tops.append({top["token"]: top["logprob"] for top in token["top_logprobs"]})


def _logprobs(made: Choice, logprobs: dict[str, Any]) -> None:
    made.tokens += logprobs["tokens"]
    made.logprobs += logprobs["token_logprobs"]
    made.tops += logprobs["top_logprobs"]
    made.offsets += logprobs["text_offset"]


def _of_pieces(made: dict[int, Choice], pieces: Sequence[dict[str, Any]]) -> Seen:
    common = {
        (one["id"], one["created"], one["model"], one["system_fingerprint"]) for one in pieces
    }
    assert len(common) == 1, "the pieces of one answer have one id, time, model and fingerprint"
    # Where usage was asked for, all pieces but the last say null.
    usages = [body["usage"] for body in pieces if "usage" in body]
    assert len(usages) in (0, len(pieces))
    assert not any(usages[:-1])
    if usages:
        assert pieces[-1]["choices"] == []
    return _seen(made, pieces[-1], usages)


def _seen(made: dict[int, Choice], last: dict[str, Any], usages: list[dict[str, Any]]) -> Seen:
    choices = [made[index] for index in range(len(made))]
    assert all(choice.finish_reason for choice in choices)
    usage = usages[-1] if usages else None
    return Seen(choices, usage, last["flashduet"], last.get("meta_info"))
