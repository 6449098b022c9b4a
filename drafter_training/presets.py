"""Whole recipes by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafter_training.blocks import AnchorKind
from drafter_training.drafter import DrafterShape
from drafter_training.generation import DataSettings
from drafter_training.loss import LossRule
from drafter_training.trainer import TrainSettings


@dataclass(frozen=True)
class Preset:
    """From no data to a drafter.

    answer_tokens: to be generated. slots: sequences decoded at once. anchors: blocks a sequence and
    step. short_blocks: share of passes over short ones, see `BlockRule.drawn`. common_tokens: see
    `ObjectiveSettings`. cache_gib: features kept on disk at most.
    """

    answer_tokens: int
    data: DataSettings = field(default_factory=DataSettings)
    slots: int = 64
    shape: DrafterShape = field(default_factory=DrafterShape)
    loss: LossRule = field(default_factory=LossRule)
    anchors: int = 24
    anchor_kind: AnchorKind = "random"
    short_blocks: float = 0.0
    common_tokens: int = 4096
    train: TrainSettings = field(default_factory=TrainSettings)
    cache_gib: float = 16.0


PRESETS = {
    # Slot weights and short blocks: what paid most a step here (docs/training.md, ablations).
    "default": Preset(
        answer_tokens=2_000_000, loss=LossRule(weighting="dpace"), anchors=32, short_blocks=0.6
    ),
    # Minutes on two cores with a small target: shows that everything works, not what it can reach.
    "smoke": Preset(
        answer_tokens=6_000,
        data=DataSettings(max_answer_tokens=48, max_length=192, shard_sequences=16),
        slots=16,
        shape=DrafterShape(layers=2, features=3, block_length=4),
        loss=LossRule(gamma=1.5),
        anchors=16,
        common_tokens=1024,
        train=TrainSettings(epochs=12, held_out_share=1 / 8, held_out=16, checkpoint_seconds=30.0),
        cache_gib=1.0,
    ),
}
"""`smoke` ends within five minutes on two cores for a target of a few million weights."""
