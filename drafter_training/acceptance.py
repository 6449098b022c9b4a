"""Acceptance length, teacher forced: what real greedy decoding would accept of known answers.

For a greedy answer it is exact: the target's choices are the answer's tokens, so the rounds of real
decoding are a walk over it, and every block of the walk is among the blocks at all its positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from draft_service.network import DFlashNetwork
from drafter_training.blocks import UNKNOWN, BlockRule, Blocks, every_block
from drafter_training.dataset import Batch
from drafter_training.drafting import greedy_drafts
from drafter_training.objective import TargetHead
from drafter_training.packing import denoise


@dataclass(frozen=True)
class Tau:
    """Committed tokens over rounds, bonus included."""

    tokens: int = 0
    rounds: int = 0

    @property
    def value(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def __add__(self, other: Tau) -> Tau:
        return Tau(self.tokens + other.tokens, self.rounds + other.rounds)


@torch.no_grad()
def every_draft(
    network: DFlashNetwork,
    batch: Batch,
    target: TargetHead,
    rule: BlockRule,
    shortlist: torch.Tensor | None = None,
) -> tuple[Blocks, torch.Tensor]:
    """Blocks at all positions of the answers and their greedy drafts, int64 [N, A, B - 1].

    shortlist: int64 [k], the only tokens drafted; None: all.
    """
    blocks = every_block(batch, rule)
    hidden = denoise(network, batch, target.embedding, blocks)
    slots = hidden[:, :, :-1] if rule.given == "truth" else hidden[:, :, 1:]
    known = blocks.labels != UNKNOWN
    drafts = torch.full(known.shape, UNKNOWN - 1)
    rows = slots[known.to(slots.device)].to(target.head.dtype)
    anchors = blocks.tokens[..., 0].flatten().tolist()
    counts = known.sum(-1).flatten().tolist()
    drafts[known] = greedy_drafts(network, rows, anchors, counts, target.head, shortlist)
    return blocks, drafts


def agreed(drafts: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Leading drafts that are right, int64 [...] from two [..., B - 1]."""
    return (drafts == labels).long().cumprod(-1).sum(-1)


def walk(accepted: list[int], answer_tokens: int) -> Iterator[tuple[int, int]]:
    """Rounds of decoding an answer as (offset of the anchor, tokens committed).

    accepted: right drafts of the block at each offset, from the answer's first token on.
    """
    place = 0
    while place < answer_tokens - 1:
        # The last token wanted needs no draft: the target's own follows what was agreed.
        committed = min(accepted[place], answer_tokens - place - 2) + 1
        yield place, committed
        place += committed


def walk_tau(
    network: DFlashNetwork,
    batch: Batch,
    target: TargetHead,
    rule: BlockRule,
    shortlist: torch.Tensor | None = None,
) -> list[Tau]:
    """Acceptance length of each answer of the batch."""
    blocks, drafts = every_draft(network, batch, target, rule, shortlist)
    counts = agreed(drafts, blocks.labels).tolist()
    results = []
    for row, answer in enumerate((batch.lengths - batch.prompt_lengths).tolist()):
        rounds = [committed for _, committed in walk(counts[row], answer)]
        results.append(Tau(sum(rounds), len(rounds)))
    return results
