"""Answers that repeat themselves, which flatter every way of guessing what comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

NGRAM = 8
LOOPING_SHARE = 0.2


def repeated_share(token_ids: Sequence[int], n: int = NGRAM) -> float:
    """Share of the tokens that lie in an n-gram which occurs more than once, in 0 .. 1."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    counts = Counter(grams)
    covered: set[int] = set()
    for start, gram in enumerate(grams):
        if counts[gram] > 1:
            covered.update(range(start, start + n))
    return len(covered) / len(token_ids) if token_ids else 0.0


def loops(token_ids: Sequence[int]) -> bool:
    """Whether repeated n-grams cover more than a fifth of the answer."""
    return repeated_share(token_ids) > LOOPING_SHARE
