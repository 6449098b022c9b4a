"""Files of prompts: JSON lines, and the ids that a model's own chat template makes of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashduet.errors import ConfigurationError

NO_CATEGORY = "uncategorized"
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A user's first message, and its ids in the model's chat template, opened for the answer."""

    id: str
    category: str
    text: str
    token_ids: tuple[int, ...]


def numbered_lines(file: Path, option: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1.

    Args:
        option: which the file was given by, for the errors.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        # Not splitlines: JSON strings may hold U+2028 and other ends of lines as they are.
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigurationError(f"{option} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{option} {file}: not UTF-8 ({error})") from error
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def read_prompts(
    file: Path, model_folder: Path, limit: int | None = None, *, limit_each: int | None = None
) -> list[FilePrompt]:
    """Read JSON lines with `id`, `turns` and perhaps `category`; the first turn is used.

    Args:
        model_folder: whose tokenizer and chat template make the ids.
        limit: use only the first so many.
        limit_each: use only the first so many of each category.

    Raises:
        ConfigurationError: the file or a line of it is not what it should be, or the model has no
            chat template.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if not tokenizer.chat_template:
        raise ConfigurationError("the model has no chat template, which the prompts go through")
    taken: Counter[str] = Counter()
    prompts = []
    for identifier, category, text in first_turns(file)[:limit]:
        taken[category] += 1
        if limit_each is not None and taken[category] > limit_each:
            continue
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(rendered, add_special_tokens=False, verbose=False)
        prompts.append(FilePrompt(identifier, category, text, tuple(ids)))
    return prompts


def first_turns(file: Path) -> list[tuple[str, str, str]]:
    """Id, category and first turn of each line.

    Raises:
        ConfigurationError: the file or a line of it is not what it should be.
    """
    found = []
    for number, line in numbered_lines(file, "--prompts"):
        try:
            entry = json.loads(line)
            category = str(entry.get("category", NO_CATEGORY))
            found.append((str(entry["id"]), category, str(entry["turns"][0])))
        except _MALFORMED as error:
            raise ConfigurationError(
                f'--prompts {file}, line {number}: {{"id": ..., "turns": ["..."]}} expected'
            ) from error
    if not found:
        raise ConfigurationError(f"--prompts {file}: it holds no prompts")
    return found
