"""Prompt lookup decoding on a known answer: the drafter that costs nothing, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_NGRAM = 3


def lookup_rounds(
    prompt: Sequence[int], answer: Sequence[int], block_length: int, longest: int = LONGEST_NGRAM
) -> list[int]:
    """Tokens committed by each round, bonus included, the prefill's token not counted.

    A round drafts what followed the last earlier occurrence of the longest matching n-gram of the
    text so far, block_length - 1 tokens at most, and is accepted greedily. For a greedy answer that
    is what decoding with prompt lookup does.
    """
    text = [*prompt, *answer]
    # The last position after each n-gram that ends before `seen`.
    followers: dict[tuple[int, ...], int] = {}
    seen = 0
    place, rounds = len(prompt) + 1, []
    while place < len(text):
        for end in range(seen, place):
            for n in range(1, min(longest, end) + 1):
                followers[tuple(text[end - n : end])] = end
        seen = place
        draft: Sequence[int] = ()
        for n in range(longest, 0, -1):
            start = followers.get(tuple(text[place - n : place]))
            if start is not None:
                draft = text[start : min(start + block_length - 1, place)]
                break
        agreed = 0
        while (
            agreed < min(len(draft), len(text) - place - 1)
            and draft[agreed] == text[place + agreed]
        ):
            agreed += 1
        rounds.append(agreed + 1)
        place += agreed + 1
    return rounds
