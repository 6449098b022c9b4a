"""From the head's outputs to draft tokens: maps a partial head's rows back, walks candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.native_walk import load_walk
from draft_service.selector import Candidates, CandidateSelector
from draft_service.work import Drafts, ProposeWork
from flashduet.sampling.choose import (
    BadLogits,
    DraftChoice,
    RowBlock,
    Shortlist,
    choose_draft_blocks,
)
from flashduet.sampling.logit_table import LEAST_TEMPERATURE
from flashduet.sampling.noise import gumbels, row_keys

# Of how many of a slot's most likely tokens the selector's candidates are sought with noise: noise
# seldom lifts one from beyond, and the one that would win without a selector is added anyway.
_NOISED = 4


class Chooser:
    """Chooses the tokens of a step's proposals.

    Args:
        vocab_size: of the target.
        head_ids: int64 [k], ascending, of a head over a part of the vocabulary.
        selector: DFlash 2's, or None.
    """

    def __init__(
        self, vocab_size: int, head_ids: Tensor | None, selector: CandidateSelector | None
    ) -> None:
        self._head_ids = head_ids
        self._shortlist = None if head_ids is None else Shortlist(head_ids, vocab_size)
        self._selector = selector
        self._walk = None if selector is None else load_walk(selector, head_ids, _NOISED)

    def choose(
        self, logits: Tensor, hidden: Tensor, proposals: Sequence[ProposeWork]
    ) -> list[Drafts | None]:
        """Drafts of each proposal, or None where its logits are no numbers.

        Args:
            logits: [n, k] of the draft slots of all proposals, block after block.
            hidden: [n, H], what they were made of.
        """
        rows = [work.block_length - 1 for work in proposals]
        try:
            return list(self._choose(logits, hidden, proposals, rows))
        except BadLogits:
            # One session's broken features must not cost the others their drafts.
            parts = zip(logits.split(rows), hidden.split(rows), proposals, strict=True)
            return [self._alone(*part) for part in parts]

    def _alone(self, logits: Tensor, hidden: Tensor, work: ProposeWork) -> Drafts | None:
        try:
            return self._choose(logits, hidden, [work], [len(logits)])[0]
        except BadLogits:
            return None

    def _choose(
        self, logits: Tensor, hidden: Tensor, proposals: Sequence[ProposeWork], rows: list[int]
    ) -> list[Drafts]:
        # As if the slots knew nothing of each other.
        chosen = choose_draft_blocks(logits, self._blocks(proposals, rows), self._shortlist)
        if self._selector is not None:
            return self._walked(logits, hidden, proposals, rows, chosen)
        return [Drafts(each.tokens, each.confidence) for each in chosen]

    @staticmethod
    def _blocks(proposals: Sequence[ProposeWork], rows: Sequence[int]) -> list[RowBlock]:
        return [
            RowBlock(
                work.anchor_position + 1,
                count,
                work.sampling,
                work.choice,
                work.context.history,
                pending=(work.anchor_token_id,),
            )
            for work, count in zip(proposals, rows, strict=True)
        ]

    def _columns(self, ids: Tensor) -> Tensor:
        """Which of the head's rows are these tokens'."""
        return ids if self._head_ids is None else torch.searchsorted(self._head_ids, ids)

    def _walked(
        self,
        logits: Tensor,
        hidden: Tensor,
        proposals: Sequence[ProposeWork],
        rows: list[int],
        chosen: Sequence[DraftChoice],
    ) -> list[Drafts]:
        selector = self._selector
        assert selector is not None
        # What would be drafted without a selector.
        winners = torch.tensor([token for each in chosen for token in each.tokens])
        winners = self._columns(winners.to(logits.device))
        if self._walk is not None and logits.dtype is torch.bfloat16:
            tokens, confidence = self._walk(logits, hidden, proposals, winners)
        else:
            candidates = self._candidates(logits.float(), proposals, rows, winners)
            anchors = [work.anchor_token_id for work in proposals]
            tokens, confidence = selector.walk(hidden, candidates, anchors, rows)
        return [
            Drafts(ids.tolist(), likely.tolist())
            for ids, likely in zip(tokens.split(rows), confidence.split(rows), strict=True)
        ]

    def _candidates(
        self,
        logits: Tensor,
        proposals: Sequence[ProposeWork],
        rows: list[int],
        winners: Tensor,
    ) -> Candidates:
        """The `top_k` best of each slot by logit / temperature + noise, to be added once."""
        assert self._selector is not None
        device, width = logits.device, logits.shape[1]
        most = min(self._selector.top_k, width)
        works = [work for work, count in zip(proposals, rows, strict=True) for _ in range(count)]
        sampled = [not work.sampling.greedy for work in works]
        wanted = min(most * _NOISED, width) if any(sampled) else most
        columns = logits.topk(wanted, dim=-1).indices
        if any(sampled):
            columns = torch.cat([columns, winners[:, None]], dim=-1)
        values = logits.gather(-1, columns)
        ids = columns if self._head_ids is None else self._head_ids[columns]
        heat = [
            1.0 if work.sampling.greedy else max(work.sampling.temperature, LEAST_TEMPERATURE)
            for work in works
        ]
        temperatures = torch.tensor(heat, device=device)
        noise = torch.zeros_like(values)
        scores = values
        if any(sampled):
            slots = [slot for count in rows for slot in range(1, count + 1)]
            keys = row_keys(
                [work.sampling.seed for work in works],
                [work.choice for work in works],
                [work.anchor_position + slot for work, slot in zip(works, slots, strict=True)],
            )
            drawn = torch.from_numpy(gumbels(keys[:, None], ids.cpu().numpy())).float().to(device)
            noise = torch.where(torch.tensor(sampled, device=device)[:, None], drawn, 0.0)
            scores = values / temperatures[:, None] + noise
            winning = columns == columns[:, -1:]
            scores = scores.masked_fill(winning, torch.inf)
            scores[:, -1].masked_fill_(winning.sum(-1) > 1, -torch.inf)
        best = scores.topk(most, dim=-1).indices
        order = ids.gather(-1, best).argsort(-1)
        best = best.gather(-1, order)
        return Candidates(
            ids.gather(-1, best), values.gather(-1, best), temperatures, noise.gather(-1, best)
        )
