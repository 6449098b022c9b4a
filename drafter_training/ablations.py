"""Variants of the recipe, each trained briefly from the same start on the same data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from drafter_training.acceptance import Tau, walk_tau
from drafter_training.blocks import BlockRule
from drafter_training.dataset import ShardDataset
from drafter_training.features import FeatureSource, SomeFeatures
from drafter_training.presets import Preset
from drafter_training.shards import ShardFolder
from drafter_training.trainer import Trainer, TrainSettings
from drafter_training.workspace import Workspace
from flashduet.models import text_config

Change = Callable[[Preset], Preset]


def _shape(**changes: object) -> Change:
    return lambda p: replace(p, shape=replace(p.shape, **changes))  # type: ignore[arg-type]


def _loss(**changes: object) -> Change:
    return lambda p: replace(p, loss=replace(p.loss, **changes))  # type: ignore[arg-type]


def _rate(rate: float) -> Change:
    return lambda p: replace(p, train=replace(p.train, learning_rate=rate))


ABLATIONS: dict[str, dict[str, Change]] = {
    "layers": {str(n): _shape(layers=n) for n in (1, 2, 3, 5)},
    "features": {str(n): _shape(features=n) for n in (1, 3, 5)},
    "block": {str(n): _shape(block_length=n) for n in (4, 8, 16)},
    "short-blocks": {
        f"{share:g}": lambda p, share=share: replace(p, short_blocks=share)  # type: ignore[misc]
        for share in (0.0, 0.75)
    },
    "anchors": {
        "random": lambda p: p,
        "fixed": lambda p: replace(p, anchor_kind="fixed"),
    },
    "weighting": {name: _loss(weighting=name) for name in ("decay", "flat", "dpace")},
    "distillation": {f"{share:g}": _loss(distillation=share) for share in (0.0, 0.5, 1.0)},
    "start": {"target layers": lambda p: p, "random": _shape(copied_layers=())},
    "selector": {str(rank): _shape(selector_rank=rank) for rank in (0, 24)},
    "rate": {f"{rate:g}": _rate(rate) for rate in (3e-4, 1e-3, 2e-3)},
    "injection": {
        "block diffusion, keys and values": lambda p: p,
        "block diffusion, input fusion": _shape(fused_input=True),
        "autoregressive, keys and values": _shape(autoregressive=True),
        "autoregressive, input fusion": _shape(autoregressive=True, fused_input=True),
    },
}
"""By name: variants by label."""

SERVED_LENGTHS = (4, 8, 16)
"""Block lengths at which the variants of `block` are measured."""


@dataclass(frozen=True)
class AblationRow:
    """tau: of decoding held-out greedy answers, teacher forced. tau_at: by served block length."""

    variant: str
    steps: int
    seconds: float
    held_out_loss: float
    tau: float
    tau_at: dict[int, float]


class Ablation:
    """One comparison over folders of shards."""

    def __init__(self, workspace: Workspace, data: list[Path], settings: TrainSettings) -> None:
        """settings: with `steps` or `minutes`, the same for every variant."""
        self._workspace, self._settings = workspace, settings
        self._folders = [ShardFolder(folder) for folder in data]

    def run(
        self, name: str, report: Callable[[str, float], None] = lambda *_: None
    ) -> Iterator[AblationRow]:
        """Trains each variant in turn; report: told (variant, share done).

        Slots are weighed by decay and blocks have their whole length, as published, unless the
        variant says otherwise: so the figures can stand beside the paper's.
        """
        given = self._workspace.preset
        plain = self._workspace.preset = replace(
            given, loss=replace(given.loss, weighting="decay"), short_blocks=0.0
        )
        whole, features = self._workspace.dataset(self._folders)
        features.prepare(self._folders)
        for label, change in ABLATIONS[name].items():
            changed = change(plain)
            settings = replace(self._settings, learning_rate=changed.train.learning_rate)
            self._workspace.preset = changed
            folder = self._workspace.root / f"ablation-{name}" / label.replace(", ", "-")
            shutil.rmtree(folder, ignore_errors=True)
            dataset = self._chosen(whole, features) if name == "features" else whole
            trainer = self._workspace.assemble(dataset, folder, settings).trainer
            trainer.run(lambda p, label=label: report(label, p.done))  # type: ignore[misc]
            last = trainer.history[-1]
            lengths = SERVED_LENGTHS if name == "block" else ()
            served = {length: self._served(trainer, dataset, length) for length in lengths}
            yield AblationRow(
                label, trainer.step, last.seconds, last.held_out_loss, last.tau, served
            )
        self._workspace.preset = given

    def _chosen(self, whole: ShardDataset, features: FeatureSource) -> ShardDataset:
        """The dataset with as many features as the variant has, evenly taken, the last included."""
        count, taps = self._workspace.preset.shape.features, len(features.layer_ids)
        chosen = (
            [taps - 1]
            if count == 1
            else [round(i * (taps - 1) / (count - 1)) for i in range(min(count, taps))]
        )
        hidden = text_config(self._workspace.target.config).hidden_size
        return ShardDataset(self._folders, SomeFeatures(features, chosen, hidden), hidden)

    def _served(self, trainer: Trainer, dataset: ShardDataset, length: int) -> float:
        """τ when blocks of another length are drafted and verified."""
        rule = BlockRule(length, trainer.blocks.mask_token_id, anchors=0)
        total = Tau()
        for index in trainer.held_out[: trainer.settings.held_out]:
            if dataset[index].greedy:
                batch = dataset.load([index])
                total = total + walk_tau(trainer.network, batch, trainer.target, rule)[0]
        return total.value
