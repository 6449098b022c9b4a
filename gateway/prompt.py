"""The prompt of a request: its form checked, its ids, and its text where that is wanted back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict, SerializeToJsonError

from flashduet.errors import ContextTooLong, InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from gateway.router import ServedModel
from gateway.tokenization import ChatTurn, Tokenizer

ROLES = ("system", "user", "assistant")


async def prompt(
    message: pb.GenerateRequest, served: ServedModel, tokenizer: Tokenizer
) -> tuple[str, tuple[int, ...]]:
    """The field that holds the prompt, and its ids.

    Raises:
        InvalidRequest: names the field, its value and its limit.
    """
    kind = message.WhichOneof("prompt")
    if kind == "text":
        _check_characters("text", len(message.text), served, tokenizer)
        return "text", _some("text", await tokenizer.encode_text(message.text))
    if kind == "chat":
        # Every message takes at least a token; a template walks through all of them first.
        _check_count("messages", "messages", len(message.chat.messages), served)
        turns = _turns(message.chat.messages)
        _check_characters("messages", sum(len(t.content) for t in turns), served, tokenizer)
        variables = _variables(message.chat)
        return "messages", _some("messages", await tokenizer.encode_chat(turns, variables))
    if kind == "token_ids":
        ids = message.token_ids.ids
        _check_count("token_ids", "tokens", len(ids), served)
        if len(ids) and max(ids) >= served.vocab_size:
            raise InvalidRequest("token_ids", max(ids), f"must be below {served.vocab_size}")
        return "token_ids", _some("token_ids", ids)
    raise InvalidRequest("prompt", "nothing", "one of text, chat and token_ids must be given")


def _check_count(field: str, what: str, count: int, served: ServedModel) -> None:
    """Refuse at once what cannot fit, before anything is done for each of them."""
    if count > served.context_window:
        raise ContextTooLong(
            field,
            f"{count} {what}",
            f"at most {served.context_window} can fit the context window of "
            f"{served.context_window} tokens",
        )


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


def _variables(chat: pb.ChatMessages) -> dict[str, object]:
    """The chat template's variables; protobuf knows only floats, templates want whole numbers."""
    try:
        given = MessageToDict(chat.template_kwargs)
    except (SerializeToJsonError, ValueError) as error:
        raise InvalidRequest("template_kwargs", "a number", "must be finite") from error
    return {name: _whole(value) for name, value in given.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return value


def echo(message: pb.GenerateRequest, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The prompt's text as the client knows it, if the answers are to begin with it."""
    if not message.echo:
        return ""
    if message.WhichOneof("prompt") == "text":
        return message.text
    return tokenizer.decode(prompt_ids, include_special_tokens=message.include_special_tokens)


def _check_characters(
    field: str, characters: int, served: ServedModel, tokenizer: Tokenizer
) -> None:
    """Refuse what cannot fit before spending seconds on tokenizing it."""
    most = served.context_window * tokenizer.longest_token
    if characters > most:
        raise ContextTooLong(
            field,
            f"{characters} characters",
            f"at most {most} can fit the context window of {served.context_window} tokens",
        )
