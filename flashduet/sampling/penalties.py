"""Bias and penalties: the logits that a request's rows are chosen from, where they are not raw.

In this order, each step rounded to float32 as it would be by a model server that changes whole rows
of logits: bias; repetition (over prompt and answer); frequency and presence (over the answer). A
row sees its session's committed tokens and those of the block before it, so a block is chosen as
one token at a time would be. Only the logits of biased tokens and of tokens that appeared are
touched; where they stand on another device, only those cross.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from flashduet.sampling.history import TokenHistory
from flashduet.sampling.logit_bias import LogitBias
from flashduet.sampling.params import Sampling

Values = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_LARGEST = np.finfo(np.float32).max
_SMALLEST = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of logits that one session's tokens are chosen from.

    Attributes:
        first_position: absolute, of the token that row 0 chooses; row i is for the i-th after it.
        rows: how many.
        sampling: the request's parameters.
        choice: index among the request's answers.
        history: of the session; without it only sampling that needs none can be followed.
        pending: tokens right after the history that every row sees.
        drafts: tokens after those; row i sees the first i.

    Raises:
        ValueError: the history is missing, or does not reach to first_position.
    """

    first_position: int
    rows: int
    sampling: Sampling
    choice: int = 0
    history: TokenHistory | None = None
    pending: Sequence[int] = ()
    drafts: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.sampling.needs_history:
            return
        if self.history is None:
            raise ValueError("presence, frequency and repetition penalty need a token history")
        known = len(self.history) + len(self.pending)
        if known != self.first_position:
            raise ValueError(f"{known} tokens are known before position {self.first_position}")


def with_penalties(logits: torch.Tensor, blocks: Sequence[RowBlock]) -> torch.Tensor:
    """Logits [n, V] with bias and penalties of the blocks, one block's rows after the other's.

    A float32 copy, or the same tensor where nothing changes. Token ids outside of the vocabulary
    are passed over.
    """
    if not any(block.sampling.penalized for block in blocks):
        return logits
    changed = logits.to(torch.float32, copy=True)
    start = 0
    for block in blocks:
        if block.sampling.penalized:
            _penalize(changed[start : start + block.rows], block)
        start += block.rows
    return changed


def _penalize(rows: torch.Tensor, block: RowBlock) -> None:
    sampling, vocabulary = block.sampling, rows.shape[1]
    if len(sampling.logit_bias):
        assert isinstance(sampling.logit_bias, LogitBias)
        ids, bias = _bias_arrays(sampling.logit_bias)
        inside = ids < vocabulary
        _change(rows, ids[inside], lambda values: values + bias[inside])
    if sampling.needs_history:
        assert block.history is not None
        seen = _seen(block, vocabulary)
        _change(rows, seen.token_ids, lambda values: _penalized(values, seen, sampling))


@dataclass(frozen=True, slots=True)
class _Seen:
    """Token ids [m], and for each row how often it sees them: [rows or 1, m]."""

    token_ids: Ids
    total: Ids
    answer: Ids


def _seen(block: RowBlock, vocabulary: int) -> _Seen:
    history = block.history
    assert history is not None
    ids, total, answer = history.token_ids, history.total_counts, history.answer_counts
    after = [*block.pending, *block.drafts]
    if after:
        # Tokens after the history, by place in the arrays; new ones are put behind.
        slots = {token: slot for token in after if (slot := history.slot(token)) is not None}
        new = [token for token in dict.fromkeys(after) if token not in slots]
        slots |= {token: len(ids) + i for i, token in enumerate(new)}
        ids = np.concatenate([ids, np.array(new, dtype=np.int64)])
        counts = np.zeros((block.rows, len(ids)), dtype=np.int64)
        for i, token in enumerate(after):
            counts[max(0, i + 1 - len(block.pending)) :, slots[token]] += 1
        fresh = np.zeros(len(new), dtype=np.int64)
        total = counts + np.concatenate([total, fresh])
        answer = counts + np.concatenate([answer, fresh])
    else:
        total, answer = total[None], answer[None]
    counted = total if block.sampling.repetition_penalty != 1 else answer
    kept = counted.any(axis=0) & (ids < vocabulary)
    return _Seen(ids[kept], total[:, kept], answer[:, kept])


def _penalized(values: Values, seen: _Seen, sampling: Sampling) -> Values:
    # A penalty below float32's range would divide by 0.
    repetition = np.float32(max(sampling.repetition_penalty, float(_SMALLEST)))
    with np.errstate(over="ignore"):
        repeated = np.where(values > 0, values / repetition, values * repetition)
        values = np.where(seen.total > 0, repeated, values)
        values = values - np.float32(sampling.frequency_penalty) * seen.answer.astype(np.float32)
        appeared = (seen.answer > 0).astype(np.float32)
        values = values - np.float32(sampling.presence_penalty) * appeared
    # A tiny repetition penalty must not make a logit infinite, which would be an error.
    return np.minimum(values, _LARGEST)


@lru_cache(maxsize=256)
def _bias_arrays(bias: LogitBias) -> tuple[Ids, Values]:
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)


def _change(rows: torch.Tensor, token_ids: Ids, change: Callable[[Values], Values]) -> None:
    ids = torch.from_numpy(token_ids).to(rows.device)
    values = rows.index_select(1, ids).cpu().numpy()
    rows.index_copy_(1, ids, torch.from_numpy(change(values)).to(rows.device))
