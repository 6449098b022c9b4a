"""The prompts of a check, as the gateway and Transformers both get them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from flashduet.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    """A user's first message, and its ids by the model's own chat template."""

    id: str
    text: str
    token_ids: tuple[int, ...]


def read_prompts(file: Path, model_folder: Path, limit: int | None) -> list[CheckPrompt]:
    """Read JSON lines with `id` and `turns`; the first turn of each is used.

    Args:
        model_folder: whose tokenizer and chat template make the ids.
        limit: use only the first so many lines.

    Raises:
        ConfigurationError: the file or a line of it is not what it should be.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if not tokenizer.chat_template:
        raise ConfigurationError("the model has no chat template, which this check goes through")
    prompts = []
    for identifier, text in _lines(file)[:limit]:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(rendered, add_special_tokens=False, verbose=False)
        prompts.append(CheckPrompt(identifier, text, tuple(ids)))
    return prompts


def _lines(file: Path) -> list[tuple[str, str]]:
    try:
        # Not splitlines: JSON strings may hold U+2028 and other ends of lines as they are.
        raw = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigurationError(f"--prompts {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--prompts {file}: not UTF-8 ({error})") from error
    found = []
    for number, line in enumerate(raw, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            found.append((str(entry["id"]), str(entry["turns"][0])))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigurationError(
                f'--prompts {file}, line {number}: {{"id": ..., "turns": ["..."]}} expected'
            ) from error
    if not found:
        raise ConfigurationError(f"--prompts {file}: it holds no prompts")
    return found
