"""The file of prompts: JSON lines, each of them one prompt or one conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashduet.client import Message
from flashduet.errors import ConfigurationError
from flashduet_cli.prompt_file import numbered_lines

_FORMS = '"prompt": "...", "turns": ["...", ...] or "messages": [{"role": ..., "content": ...}]'


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """One line of the file.

    Attributes:
        id: unique within the file; the line's number, from 1, where none is given.
        messages: what every question comes after; for a prompt and for turns nothing.
        turns: questions of the user, asked one after the other, each with the answers so far. Where
            `messages` end with the question there is none.
    """

    id: str
    messages: tuple[Message, ...]
    turns: tuple[str, ...]


def read_prompts(file: Path) -> list[BatchPrompt]:
    """The prompts of a file, in its order.

    Raises:
        ConfigurationError: the file cannot be read, or names the line that is not what it should
            be.
    """
    prompts: dict[str, BatchPrompt] = {}
    for number, line in numbered_lines(file, "--file"):
        try:
            prompt = _prompt(json.loads(line), number)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"--file {file}, line {number}: {error}") from error
        if prompt.id in prompts:
            raise ConfigurationError(f"--file {file}, line {number}: a second {prompt.id!r}")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ConfigurationError(f"--file {file}: it holds no prompts")
    return list(prompts.values())


def _prompt(entry: Any, number: int) -> BatchPrompt:
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON object with {_FORMS} is wanted")
    identifier = entry.get("id", number)
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        raise ValueError('"id" must be a string or a whole number')
    given = [name for name in ("prompt", "turns", "messages") if name in entry]
    if len(given) != 1:
        raise ValueError(f"exactly one of {_FORMS} is wanted")
    value = entry[given[0]]
    if given == ["messages"]:
        return BatchPrompt(str(identifier), _messages(value), ())
    turns = [value] if given == ["prompt"] else value
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        wanted = "a string" if given == ["prompt"] else "a list of at least one string"
        raise ValueError(f'"{given[0]}" must be {wanted}')
    return BatchPrompt(str(identifier), (), tuple(turns))


def _messages(value: Any) -> tuple[Message, ...]:
    def message(item: Any) -> Message:
        if not isinstance(item, dict) or item.keys() != {"role", "content"}:
            raise ValueError('each of "messages" must have "role" and "content", and no more')
        if not isinstance(item["role"], str) or not isinstance(item["content"], str):
            raise ValueError('"role" and "content" of "messages" must be strings')
        return Message(item["role"], item["content"])

    if not isinstance(value, list) or not value:
        raise ValueError('"messages" must be a list of at least one message')
    return tuple(map(message, value))
