"""The one function that chooses tokens: the target's on its logits, the drafter's on its own.

docs/sampling.md states the rule. The result for a row depends on that row's logits and key only:
not on the other rows, their number or order, the number of threads or the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from flashduet.sampling.by_arrays import choose_by_arrays
from flashduet.sampling.logit_table import BadLogits, check_shape
from flashduet.sampling.machine import native_choice
from flashduet.sampling.params import Sampling
from flashduet.sampling.penalties import RowBlock, with_penalties
from flashduet.sampling.shortlist import Shortlist

__all__ = [
    "BadLogits",
    "Choice",
    "DraftChoice",
    "RowBlock",
    "RowKey",
    "Shortlist",
    "choose_blocks",
    "choose_draft_blocks",
    "choose_draft_rows",
    "choose_drafts",
    "choose_rows",
    "choose_tokens",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RowKey:
    """What a row of logits is for: the position of the token being chosen, and its request's rule.

    Attributes:
        position: absolute, of the token to choose (the row's own position + 1).
        sampling: the request's parameters.
        choice: index among the request's answers.
    """

    position: int
    sampling: Sampling
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen token of each row."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The chosen token of each row, and its probability before noise under the row's filters."""

    tokens: list[int]
    confidence: list[float]


def choose_blocks(logits: torch.Tensor, blocks: Sequence[RowBlock]) -> list[list[int]]:
    """Choose for blocks of any sessions: logits [n, V], the blocks' rows one after the other.

    Returns:
        The tokens of each block.

    Raises:
        BadLogits: a row holds NaN or +inf, or nothing but -inf.
        ValueError: the tensor is not [n, V], n not being the number of the blocks' rows.
    """
    return _by_block(_choose(logits, blocks).tokens, blocks)


def choose_draft_blocks(
    logits: torch.Tensor, blocks: Sequence[RowBlock], shortlist: Shortlist | None = None
) -> list[DraftChoice]:
    """As choose_blocks, with confidences, for a drafter: penalties of a row also see the tokens
    chosen here for the rows before it, instead of the blocks' `drafts`.

    Args:
        shortlist: logits are [n, k], of its tokens only. No other is chosen.

    Raises as choose_blocks.
    """
    if shortlist is not None and any(block.sampling.penalized for block in blocks):
        logits, shortlist = shortlist.expanded(logits), None
    unsettled = [block.sampling.needs_history and block.rows > 1 for block in blocks]
    confident = not all(unsettled)
    chosen = _choose(logits, blocks, confident, shortlist)
    confidence = chosen.confidence if confident else [0.0] * len(chosen.tokens)
    results = [
        DraftChoice(tokens, sure)
        for tokens, sure in zip(
            _by_block(chosen.tokens, blocks), _by_block(confidence, blocks), strict=True
        )
    ]
    start = 0
    for i, block in enumerate(blocks):
        if unsettled[i]:
            rows = logits[start : start + block.rows]
            results[i] = _settled(rows, block, results[i].tokens, start)
        start += block.rows
    return results


def _settled(logits: torch.Tensor, block: RowBlock, tokens: list[int], start: int) -> DraftChoice:
    """A block's drafts where each row sees those before it.

    All rows are chosen anew as if the last answer stood before them, until it repeats. The first
    row's token is right at once, and each pass makes one more right at least; as repetitions are
    few, the second or third answer is nearly always the last.
    """
    while True:
        try:
            chosen = _choose(logits, [replace(block, drafts=tokens[:-1])], confident=True)
        except BadLogits as error:
            raise BadLogits(tuple(start + row for row in error.rows)) from None
        if chosen.tokens == tokens:
            return chosen
        tokens = chosen.tokens


def choose_tokens(
    logits: torch.Tensor, first_position: int, sampling: Sampling, choice: int = 0
) -> Choice:
    """Choose for consecutive positions of one request that needs no history.

    Args:
        logits: [n, V], any float type; row i is for the token of position first_position + i.

    Raises:
        BadLogits, ValueError: as choose_blocks.
    """
    [tokens] = choose_blocks(logits, [_consecutive(logits, first_position, sampling, choice)])
    return Choice(tokens)


def choose_rows(logits: torch.Tensor, rows: Sequence[RowKey]) -> Choice:
    """Choose for rows of any requests that need no history: logits [n, V], one key a row.

    Raises as choose_blocks.
    """
    return Choice(_choose(logits, _single_rows(rows)).tokens)


def choose_drafts(
    logits: torch.Tensor, first_position: int, sampling: Sampling, choice: int = 0
) -> DraftChoice:
    """As choose_tokens, with confidences: a drafter's proposal. Raises as choose_blocks."""
    block = _consecutive(logits, first_position, sampling, choice)
    return choose_draft_blocks(logits, [block])[0]


def choose_draft_rows(logits: torch.Tensor, rows: Sequence[RowKey]) -> DraftChoice:
    """As choose_rows, with confidences. Raises as choose_blocks."""
    return _choose(logits, _single_rows(rows), confident=True)


def _consecutive(
    logits: torch.Tensor, first_position: int, sampling: Sampling, choice: int
) -> RowBlock:
    return RowBlock(first_position, logits.shape[0], sampling, choice)


def _single_rows(rows: Sequence[RowKey]) -> list[RowBlock]:
    return [RowBlock(key.position, 1, key.sampling, key.choice) for key in rows]


def _choose(
    logits: torch.Tensor,
    blocks: Sequence[RowBlock],
    confident: bool = False,
    shortlist: Shortlist | None = None,
) -> DraftChoice:
    """Every row's token, by machine code where there is some; no confidences if none are wanted."""
    check_shape(logits)
    rows = sum(block.rows for block in blocks)
    if logits.shape[0] != rows:
        raise ValueError(f"{logits.shape[0]} rows of logits, {rows} keys")
    if shortlist is not None and logits.shape[1] != shortlist.columns:
        raise ValueError(f"{logits.shape[1]} columns, {shortlist.columns} tokens in the shortlist")
    native = native_choice() if logits.device.type == "cpu" else None
    if native is not None:
        logits = with_penalties(logits.detach(), blocks)
        return DraftChoice(*native.choose(logits, blocks, confident, shortlist))
    if shortlist is None:
        return DraftChoice(*choose_by_arrays(logits, blocks, confident))
    if all(block.sampling.greedy for block in blocks):
        # Ids ascend, so ties go to the lowest here too.
        columns, confidence = choose_by_arrays(logits, blocks, confident)
        return DraftChoice(shortlist.ids_of(columns), confidence)
    # Noise belongs to token ids.
    return DraftChoice(*choose_by_arrays(shortlist.expanded(logits), blocks, confident))


def _by_block(values: list[_T], blocks: Sequence[RowBlock]) -> list[list[_T]]:
    parts, start = [], 0
    for block in blocks:
        parts.append(values[start : start + block.rows])
        start += block.rows
    return parts
