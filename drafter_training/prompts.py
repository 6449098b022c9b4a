"""Where prompts come from: files of user turns, and the target's own chat template."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafter_training.passages import Passages

HELD_OUT_FILES = frozenset({"dev.jsonl"})
"""Evaluation prompts. Training on them would make every published figure worthless."""

_SENTINEL = "\u241fuser\u241f"

STARTERS: tuple[tuple[str, int, int], ...] = (
    # (start of the user turn, relative weight, most tokens the target may add to it)
    ("", 24, 96),
    ("Write ", 5, 64),
    ("Write a short story about ", 2, 48),
    ("Write an email ", 2, 64),
    ("Explain ", 5, 48),
    ("Describe ", 3, 48),
    ("What ", 5, 48),
    ("Who ", 3, 32),
    ("When ", 2, 32),
    ("Where ", 2, 32),
    ("How ", 5, 48),
    ("Why ", 3, 48),
    ("List ", 2, 48),
    ("Compare ", 2, 48),
    ("Imagine you are ", 2, 64),
    ("Pretend to be ", 1, 64),
    ("Give me ", 2, 48),
    ("Suggest ", 1, 48),
    ("Translate German to English: ", 4, 64),
    ("Translate the following sentence to English: ", 2, 64),
    ("Translate ", 2, 64),
    ("Summarize: ", 4, 192),
    ("Summarize the following article:\n\n", 4, 192),
    ("Rewrite the following paragraph:\n\n", 1, 128),
    ("Extract ", 1, 128),
    ("Solve ", 3, 64),
    ("Calculate ", 2, 48),
    ("If ", 3, 80),
    ("A train ", 1, 80),
    ("Find the value of ", 2, 64),
    ("Answer the question based on the given context.\n\nContext: ", 4, 192),
    ("Use the following passages to answer the question.\n\nPassage 1: ", 3, 192),
    ("Write a Python function ", 4, 80),
    ("Complete the following Python function:\n\n```python\ndef ", 5, 128),
    ("from typing import List\n\n\ndef ", 4, 128),
    ("Implement ", 2, 64),
    ("Fix the bug in this code:\n\n```python\n", 1, 128),
)

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are an expert programmer who writes clear Python.",
    "You are a patient teacher. Answer step by step.",
    "You are a concise assistant. Answer in a few sentences.",
    "You are a translator.",
    "You are a creative writer.",
)


class HeldOutPromptsError(ValueError):
    """A file that is kept for evaluation was offered as training data."""


@dataclass(frozen=True)
class Prompt:
    """What a slot starts from.

    token_ids: fed as they are. user_budget: how many tokens of the user turn the target may still
    sample (0: the prompt is complete). closing: ids that end the user turn and open the answer.
    """

    token_ids: list[int]
    user_budget: int
    closing: list[int]


def read_user_turns(path: Path) -> list[str]:
    """First user turns of a JSON-lines file with ``turns``; refuses held-out files by name."""
    if path.name in HELD_OUT_FILES:
        raise HeldOutPromptsError(
            f"{path.name} is kept for evaluation; train on other prompts (see prompts/README.md)"
        )
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["turns"][0] for line in lines if line.strip()]


class PromptSource:
    """Seeded prompts by number: the files' turns, spread among those of the target itself."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        user_turns: list[str],
        file_share: float,
        seed: int,
        passages: Passages | None = None,
    ) -> None:
        """passages: make every prompt that is not a file's a long one, about some of them."""
        self._tokenizer, self._passages = tokenizer, passages
        self._turns = list(user_turns)
        random.Random(seed).shuffle(self._turns)
        self._file_share, self._seed = file_share, seed

    def prompt(self, index: int) -> Prompt:
        """Every 1 / ``file_share``-th prompt is a file's, until the files are used up."""
        turn = int(index * self._file_share)
        if turn < len(self._turns) and int((index + 1) * self._file_share) > turn:
            return self._from_file(turn)
        return self._from_target(random.Random(f"{self._seed}:{index}:prompt"))

    def _from_file(self, turn: int) -> Prompt:
        before, after = self._template(None)
        return Prompt(self._encode(before + self._turns[turn] + after), 0, [])

    def _from_target(self, chance: random.Random) -> Prompt:
        system = chance.choice(SYSTEM_PROMPTS) if chance.random() < 0.15 else None
        before, after = self._template(system)
        if self._passages is not None:
            starter, budget = self._passages.turn(chance)
        else:
            weights = [weight for _, weight, _ in STARTERS]
            starter, _, budget = chance.choices(STARTERS, weights)[0]
        if not budget:
            return Prompt(self._encode(before + starter + after), 0, [])
        # A trailing space would split the next word's token, so it is left to the target.
        return Prompt(self._encode(before + starter.rstrip(" ")), budget, self._encode(after))

    def _template(self, system: str | None) -> tuple[str, str]:
        messages = [{"role": "user", "content": _SENTINEL}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before, after = str(text).split(_SENTINEL)
        return before, after

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
