"""Long prompts without a data set: the target's own earlier answers as passages."""

from __future__ import annotations

import random
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafter_training.shards import ShardFolder

_FEWEST_TOKENS = 64

FORMS: tuple[tuple[str, str, int, int], ...] = (
    # (before the passages, after them, most passages, most tokens the target may add)
    ("Summarize: ", "", 5, 0),
    ("Summarize the following article:\n\n", "", 5, 0),
    ("", "\n", 4, 32),
    ("", "\nWhat", 4, 24),
    ("", "\nWho", 4, 24),
    ("", "\nHow", 4, 24),
    ("Answer the question based on the given context.\n\nContext: ", "\n\nQuestion:", 4, 32),
    ("Write a short title for this text:\n\n", "", 3, 0),
)


@dataclass(frozen=True)
class Passages:
    """Texts of answers."""

    texts: tuple[str, ...]

    @classmethod
    def read(cls, folder: ShardFolder, tokenizer: PreTrainedTokenizerBase) -> Passages:
        """Every answer of the folder that is long enough."""
        return cls(
            tuple(
                str(tokenizer.decode(s.token_ids[s.prompt_length :], skip_special_tokens=True))
                for number in folder.numbers
                for s in folder.read(number)
                if s.answer_tokens >= _FEWEST_TOKENS
            )
        )

    def turn(self, chance: random.Random) -> tuple[str, int]:
        """The beginning of a user turn, and how many tokens the target may add to it."""
        before, after, most, budget = chance.choice(FORMS)
        parts = chance.sample(self.texts, min(chance.randint(1, most), len(self.texts)))
        return before + "\n\n".join(part.strip() for part in parts) + after, budget
