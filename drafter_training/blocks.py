"""Which blocks of a batch are denoised: anchors inside the answers, masks after them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from drafter_training.dataset import Batch

AnchorKind = Literal["random", "fixed"]
BlockInput = Literal["masks", "truth"]

UNKNOWN = -1
"""Label of a slot past the end of its sequence, or of padding."""


@dataclass(frozen=True)
class BlockRule:
    """How blocks are cut.

    length: anchor and the slots after it. anchors: at most so many blocks a sequence. kind: random
    anchors, or every length-th position of the answer (then a random choice of those, if there are
    too many). given: what the slots after the anchor hold, masks, or the true tokens (for an
    autoregressive drafter, which sees its own right guesses). short_share: of the passes, for
    blocks of half the length, twice as many (see `drawn`).
    """

    length: int
    mask_token_id: int
    anchors: int
    kind: AnchorKind = "random"
    given: BlockInput = "masks"
    short_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.short_share <= 1:
            raise ValueError(f"short blocks: {self.short_share} given, between 0 and 1 expected")

    def drawn(self, generator: torch.Generator) -> BlockRule:
        """The rule of one training pass: this one, or the one for short blocks.

        While few drafts are accepted, the last slots of a block are hardly ever reached: a pass
        over twice as many blocks of half the length costs as much and shows the first slots twice
        as much. Some long ones remain, so that the drafter knows the length that it is served at.
        """
        if self.length < 4 or not self.short_share:
            return self
        if float(torch.rand((), generator=generator)) >= self.short_share:
            return self
        return replace(self, length=self.length // 2, anchors=2 * self.anchors)


@dataclass(frozen=True)
class Blocks:
    """Packed blocks of a batch. A anchors a sequence, B slots a block.

    anchors: int64 [N, A] positions of the last committed token. valid: bool [N, A].
    tokens, positions: int64 [N, A, B]; slot 0 of tokens is the anchor.
    labels: int64 [N, A, B - 1], `UNKNOWN` where the sequence has ended or the anchor is padding.
    """

    anchors: torch.Tensor
    valid: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor

    @property
    def previous(self) -> torch.Tensor:
        """The true token before each slot, int64 [N, A, B - 1]."""
        return torch.cat([self.tokens[..., :1], self.labels[..., :-1]], -1)


def sample_blocks(batch: Batch, rule: BlockRule, generator: torch.Generator) -> Blocks:
    """Draws up to ``rule.anchors`` anchors inside each answer, without replacement.

    Padding anchors carry the distinct positions that were drawn past the answer's own: a block is
    told from another by its anchor.
    """
    place = torch.arange(batch.tokens.shape[1])
    allowed = (place >= batch.prompt_lengths[:, None]) & (place < batch.lengths[:, None] - 1)
    if rule.kind == "fixed":
        allowed &= (place - batch.prompt_lengths[:, None]) % rule.length == 0
    score = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1)
    score, anchors = score.topk(min(rule.anchors, int(allowed.sum(1).max())))
    return cut_blocks(batch, rule, anchors, score >= 0)


def every_block(batch: Batch, rule: BlockRule) -> Blocks:
    """A block at every position of each answer but its last, in order."""
    count = int((batch.lengths - 1 - batch.prompt_lengths).max())
    anchors = batch.prompt_lengths[:, None] + torch.arange(count)
    return cut_blocks(batch, rule, anchors, anchors < batch.lengths[:, None] - 1)


def cut_blocks(batch: Batch, rule: BlockRule, anchors: torch.Tensor, valid: torch.Tensor) -> Blocks:
    """Blocks at these anchors, int64 [N, A]; those that are not valid have no labels."""
    last = batch.tokens.shape[1] - 1
    positions = anchors[..., None] + torch.arange(rule.length)
    inside = (positions < batch.lengths[:, None, None]) & valid[..., None]
    truth = batch.tokens.gather(1, positions.clamp_max(last).flatten(1)).view_as(positions)
    tokens = truth.clone()
    if rule.given == "masks":
        tokens[..., 1:] = rule.mask_token_id
    return Blocks(anchors, valid, tokens, positions, truth.masked_fill(~inside, UNKNOWN)[..., 1:])
