"""The prompts of a benchmark: a file's, or some that everyone has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashduet_cli.prompt_file import read_prompts

_QUESTIONS = (
    "Explain {} to a curious child, with one example from daily life.",
    "Write a short, lively introduction to {} for a school magazine.",
    "List seven facts about {} and say of each why it matters.",
    "What do people most often get wrong about {}? Answer step by step.",
    "Compare {} with something similar, first what they share, then where they differ.",
    "Write a Python function that has to do with {}, and explain how it works.",
    "Summarize the history of {} in five sentences.",
    "Invent a dialogue between two experts who disagree about {}.",
)
_SUBJECTS = (
    "the tides", "prime numbers", "bread", "the printing press", "glaciers", "bicycles",
    "the heart", "maps",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as token ids, by the model's own chat template."""

    ids: Sequence[tuple[int, ...]]

    def some(self, count: int, most_tokens: int = 512) -> list[list[int]]:
        """So many prompts, from the first on and over again, none longer than asked."""
        return [list(self.ids[index % len(self.ids)][-most_tokens:]) for index in range(count)]

    def text(self, tokens: int, first: int = 0) -> list[int]:
        """So many tokens of prompts strung together, from prompt `first` on."""
        joined: list[int] = []
        index = first
        while len(joined) < tokens:
            joined += self.ids[index % len(self.ids)]
            index += 1
        return joined[:tokens]


def load_prompts(file: Path | None, model_folder: Path) -> Prompts:
    """A file's prompts (JSON lines with `id` and `turns`), or for None questions of our own.

    Raises:
        ConfigurationError: the file or a line of it is not what it should be, or the model has no
            chat template.
    """
    if file is not None:
        return Prompts([prompt.token_ids for prompt in read_prompts(file, model_folder)])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = []
    for question in _QUESTIONS:
        for subject in _SUBJECTS:
            text = question.format(subject)
            if tokenizer.chat_template:
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
            ids.append(tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False)))
    return Prompts(ids)
