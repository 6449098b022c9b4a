"""The prompts of an evaluation, as token ids, so that every measure sees the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from flashduet.errors import ConfigurationError

NO_CATEGORY = "uncategorized"


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A user's first message in the model's chat template, opened for the answer."""

    id: str
    category: str
    token_ids: tuple[int, ...]


def read_prompts(file: Path, model_folder: Path, limit: int | None) -> list[EvalPrompt]:
    """Read JSON lines with `id`, `turns` and perhaps `category`; the first turn is used.

    Args:
        model_folder: whose tokenizer and chat template make the ids.
        limit: use only the first so many of each category.

    Raises:
        ConfigurationError: the file or a line of it is not what it should be.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if not tokenizer.chat_template:
        raise ConfigurationError("the model has no chat template, which evaluation goes through")
    prompts: list[EvalPrompt] = []
    taken: dict[str, int] = {}
    for identifier, category, text in _lines(file):
        taken[category] = taken.get(category, 0) + 1
        if limit is not None and taken[category] > limit:
            continue
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(rendered, add_special_tokens=False, verbose=False)
        prompts.append(EvalPrompt(identifier, category, tuple(ids)))
    return prompts


def _lines(file: Path) -> list[tuple[str, str, str]]:
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
            category = str(entry.get("category", NO_CATEGORY))
            found.append((str(entry["id"]), category, str(entry["turns"][0])))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f'--prompts {file}, line {number}: {{"id": ..., "turns": ["..."]}} expected'
            ) from error
    if not found:
        raise ConfigurationError(f"--prompts {file}: it holds no prompts")
    return found
