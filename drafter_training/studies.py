"""Short studies of how drafts are taken, teacher forced on answers sampled at temperature 1.

An answer y was drawn from the target. Given it, what another rule would have accepted follows
exactly: rejection sampling keeps the draft at y with probability min(1, q(y) / p(y)); a greedy
draft is kept if it is y; with position-keyed noise the drafter has the noise under which the target
chose y, which is drawn from its law given y. So one set of answers serves all rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from draft_service.network import DFlashNetwork
from drafter_training.acceptance import agreed
from drafter_training.blocks import UNKNOWN, BlockRule, Blocks, every_block
from drafter_training.dataset import Batch
from drafter_training.drafting import draft_logits, greedy_drafts
from drafter_training.objective import TargetHead
from drafter_training.packing import denoise

_ROWS = 256
"""Rows of two whole vocabularies held at once."""


@dataclass
class SlotTally:
    """Sums over blocks. reached[k]: mean number of blocks whose first k slots were all taken."""

    blocks: int = 0
    reached: list[float] = field(default_factory=list)

    def add(self, kept: torch.Tensor) -> None:
        """kept: float [blocks, B - 1], the probability that each slot is taken, once reached."""
        reached = kept.cumprod(-1).sum(0).tolist()
        before = self.reached or [0.0] * len(reached)
        self.reached = [a + b for a, b in zip(before, reached, strict=True)]
        self.blocks += len(kept)

    @property
    def tau(self) -> float:
        """Tokens a round over blocks at all positions, bonus included."""
        return 1 + sum(self.reached) / self.blocks if self.blocks else 0.0


def posterior_noise(
    log_probs: torch.Tensor, chosen: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Standard Gumbel noise g given that argmax(log p + g) is ``chosen``; [n, V] like the input.

    Top down (Maddison, Tarlow, Minka 2014): the winner's value is Gumbel(0); the others' values are
    Gumbels at their own place, cut off at the winner's.
    """
    exponential = torch.empty_like(log_probs).exponential_(generator=generator).clamp_min_(1e-20)
    top = -torch.empty(len(log_probs), 1).exponential_(generator=generator).log()
    values = -torch.log(torch.exp(-top) + exponential * torch.exp(-log_probs))
    values.scatter_(1, chosen[:, None], top)
    return values - log_probs


@torch.no_grad()
def compare_rules(
    network: DFlashNetwork,
    batch: Batch,
    target: TargetHead,
    rule: BlockRule,
    temperature: float,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Probability that each slot is taken: float [blocks, B - 1] by rule, 0 at unknown slots."""
    blocks = every_block(batch, rule)
    hidden = denoise(network, batch, target.embedding, blocks)[:, :, 1:]
    known = blocks.labels != UNKNOWN
    labels = blocks.labels[known]
    source = (blocks.positions[..., 1:] - 1).clamp_max(batch.tokens.shape[1] - 1)
    rows = torch.arange(len(source))[:, None, None].expand_as(source)
    previous = blocks.previous[known]
    states = batch.final_states[rows[known], source[known]]
    names = ("position-keyed", "rejection", "greedy drafts")
    taken = {name: torch.zeros(known.shape) for name in names}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for part in torch.arange(len(labels)).split(_ROWS):
        right = labels[part]
        mine = hidden[known][part].to(target.head.dtype)
        ours = draft_logits(network, mine, previous[part], target.head)
        theirs = target.logits(states[part])
        p = (theirs / temperature).log_softmax(-1)
        q = (ours / temperature).log_softmax(-1)
        noise = posterior_noise(p, right, generator)
        parts["position-keyed"].append(((q + noise).argmax(-1) == right).float())
        ratio = q.gather(1, right[:, None]) - p.gather(1, right[:, None])
        parts["rejection"].append(ratio[:, 0].clamp_max(0).exp())
        parts["greedy drafts"].append((ours.argmax(-1) == right).float())
    for name in names:
        taken[name][known] = torch.cat(parts[name])
    return {name: kept[blocks.valid] for name, kept in taken.items()}


@dataclass
class Cascade:
    """What stands behind the first miss, by slot (1 is the first after the anchor).

    misses[k]: blocks whose first miss is slot k + 1, and that have a slot behind it. next_right: of
    those, the slot behind was right. run: right slots in a row behind the miss, summed.
    """

    misses: list[int]
    next_right: list[int]
    run: list[int]

    @classmethod
    def of(cls, slots: int) -> Cascade:
        return cls([0] * (slots - 1), [0] * (slots - 1), [0] * (slots - 1))

    def add(self, drafts: torch.Tensor, labels: torch.Tensor) -> None:
        """Both int64 [blocks, B - 1]; blocks with an unknown slot are left out."""
        whole = (labels != UNKNOWN).all(-1)
        right = (drafts == labels)[whole]
        first = right.long().cumprod(-1).sum(-1)
        for miss in range(len(self.misses)):
            behind = right[first == miss, miss + 1 :]
            self.misses[miss] += len(behind)
            self.next_right[miss] += int(behind[:, 0].sum())
            self.run[miss] += int(behind.long().cumprod(-1).sum())


@torch.no_grad()
def second_pass(
    network: DFlashNetwork,
    batch: Batch,
    target: TargetHead,
    blocks: Blocks,
    drafts: torch.Tensor,
    keep: int,
) -> torch.Tensor:
    """Right drafts, int64 [N, A], when slots past ``keep`` are guessed again.

    The first ``keep`` drafts stand in the block as tokens, and the masks after them are denoised a
    second time.
    """
    tokens = blocks.tokens.clone()
    known = drafts >= 0
    tokens[..., 1 : keep + 1] = torch.where(
        known[..., :keep], drafts[..., :keep], tokens[..., 1 : keep + 1]
    )
    again = Blocks(blocks.anchors, blocks.valid, tokens, blocks.positions, blocks.labels)
    hidden = denoise(network, batch, target.embedding, again)[:, :, 1:]
    mask = blocks.labels != UNKNOWN
    mask[..., :keep] = False
    rows = hidden[mask].to(target.head.dtype)
    second = drafts.clone()
    if len(rows):
        anchors = tokens[..., keep].flatten().tolist()
        counts = mask.sum(-1).flatten().tolist()
        second[mask] = greedy_drafts(network, rows, anchors, counts, target.head)
    return agreed(second, blocks.labels)
