"""What a right or wrong slot counts: weights by slot, and the target's own distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Weighting = Literal["decay", "dpace", "flat"]


@dataclass(frozen=True)
class LossRule:
    """How slots are weighed and what they should predict.

    weighting: ``decay`` weighs slot k by exp(-(k - 1) / gamma); ``dpace`` (arXiv 2605.18810) by
    what the drafter itself makes of the block: slot j counts sum over m >= j of the product over
    i <= m of (1 - alpha) q_i + alpha, q_i being the probability it gives the right token; ``flat``
    weighs all alike. gamma: None for about half the block. distillation: share of the target's own
    distribution beside the token that came (0: cross-entropy alone, 1: the distribution alone).
    """

    weighting: Weighting = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    distillation: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.distillation <= 1:
            raise ValueError(f"distillation: {self.distillation} given, between 0 and 1 expected")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"gamma: {self.gamma} given, more than 0 expected")


def usual_gamma(block_length: int) -> float:
    """7, 5 and 4 for blocks of 16, 10 and 8, as published; linear in between."""
    return max(1.0, 1.0 + 0.375 * block_length)


def slot_weights(
    rule: LossRule, right_log_probs: torch.Tensor, known: torch.Tensor
) -> torch.Tensor:
    """Weight of each slot, without gradient.

    Args:
        right_log_probs: float32 [..., B - 1], the drafter's log probability of the true token.
        known: bool [..., B - 1], whether the slot has a true token.

    Returns:
        float32 [..., B - 1], 0 where it has none.
    """
    slots = known.shape[-1]
    if rule.weighting == "dpace":
        kept = (1 - rule.alpha) * right_log_probs.detach().exp() + rule.alpha
        reached = kept.masked_fill(~known, 0).cumprod(-1)
        weights = reached.flip(-1).cumsum(-1).flip(-1)
    elif rule.weighting == "decay":
        gamma = rule.gamma or usual_gamma(slots + 1)
        weights = torch.exp(-torch.arange(slots, device=known.device) / gamma).expand(known.shape)
    else:
        weights = torch.ones(known.shape, device=known.device)
    return weights.masked_fill(~known, 0)
