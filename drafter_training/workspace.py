"""Where a training keeps its things, and how its parts are put together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from draft_service.checkpoint import load_drafter
from draft_service.config import DrafterConfig
from draft_service.network import DFlashNetwork
from drafter_training.blocks import BlockInput, BlockRule
from drafter_training.dataset import ShardDataset
from drafter_training.drafter import mask_token, new_drafter, tapped_layers, target_head
from drafter_training.feature_cache import FeatureCache
from drafter_training.features import FeatureSource
from drafter_training.objective import Objective, ObjectiveSettings
from drafter_training.presets import Preset
from drafter_training.shards import ShardFolder
from drafter_training.target import load_target, load_tokenizer, target_hash
from drafter_training.trainer import Trainer, TrainSettings
from flashduet.errors import CheckpointError, ConfigurationError
from flashduet.models import text_config

_GIB = 1 << 30


@dataclass(frozen=True)
class Assembled:
    """A trainer ready to run. start: a sentence about what its weights start from."""

    trainer: Trainer
    dataset: ShardDataset
    start: str


class Workspace:
    """One target and the folder in which a drafter for it is made.

    The data and the features are shared by all runs in it.
    """

    def __init__(self, target_folder: Path, root: Path, preset: Preset) -> None:
        self.target_folder, self.root, self.preset = target_folder, root, preset

    @property
    def data_folder(self) -> Path:
        return self.root / "data"

    @property
    def run_folder(self) -> Path:
        return self.root / "run"

    @cached_property
    def target_hash(self) -> str:
        return target_hash(self.target_folder)

    @cached_property
    def target(self) -> PreTrainedModel:
        return load_target(self.target_folder, torch.bfloat16)

    @cached_property
    def layer_ids(self) -> list[int]:
        return tapped_layers(self.preset.shape, text_config(self.target.config).num_hidden_layers)

    def cache(self) -> FeatureCache:
        size = int(self.preset.cache_gib * _GIB)
        return FeatureCache(self.root / "features", self.target_hash, self.layer_ids, size)

    def dataset(self, folders: list[ShardFolder]) -> tuple[ShardDataset, FeatureSource]:
        for folder in folders:
            if folder.facts["target"] != self.target_hash:
                raise ConfigurationError(
                    f"{folder.path} holds answers of another target than {self.target_folder}"
                )
        features = FeatureSource(self.layer_ids, self.cache(), lambda: self.target)
        hidden = text_config(self.target.config).hidden_size
        return ShardDataset(folders, features, hidden), features

    def objective(self, block_length: int, mask_token_id: int) -> ObjectiveSettings:
        """The preset's objective for blocks of this length."""
        preset = self.preset
        given: BlockInput = "truth" if preset.shape.autoregressive else "masks"
        rule = BlockRule(
            block_length,
            mask_token_id,
            preset.anchors,
            preset.anchor_kind,
            given,
            preset.short_blocks,
        )
        return ObjectiveSettings(rule, preset.loss, preset.common_tokens)

    def assemble(
        self,
        dataset: ShardDataset,
        run_folder: Path,
        settings: TrainSettings,
        *,
        init_from: Path | None = None,
        accelerator: Accelerator | None = None,
    ) -> Assembled:
        """A trainer over the dataset; it resumes if the run folder holds a checkpoint.

        Args:
            init_from: a drafter's folder to start from, instead of the target's layers.
        """
        preset, target = self.preset, self.target
        vocabulary = text_config(target.config).vocab_size
        mask = mask_token(preset.shape, load_tokenizer(self.target_folder), vocabulary)
        network, config, start = new_drafter(
            target, preset.shape, dataset.layer_ids, mask, settings.seed
        )
        if init_from is not None:
            given = load_drafter(init_from, dtype=torch.bfloat16)
            _check_same(network.config, given.config)
            _take(network, given)
            start = f"the drafter {init_from.name}"
        device = accelerator.device if accelerator else torch.device("cpu")
        head = target_head(target)
        head = replace(head, embedding=head.embedding.to(device), head=head.head.to(device))
        network.to(device).requires_grad_(True)
        network.skip_identities()
        objective = Objective(
            network,
            head,
            dataset.token_counts(vocabulary),
            self.objective(network.config.block_length, mask),
        )
        trainer = Trainer(objective, config, dataset, run_folder, settings, accelerator)
        return Assembled(trainer, dataset, start)


def _take(network: DFlashNetwork, given: DFlashNetwork) -> None:
    """The weights of a drafter to start from; it may be without a selector."""
    weights = network.state_dict() | given.state_dict()
    network.load_state_dict(weights)


def _check_same(wanted: DrafterConfig, given: DrafterConfig) -> None:
    """Raise CheckpointError where a drafter to start from has another shape."""
    ours, theirs = asdict(wanted), asdict(given)
    keys = ["hidden_size", "num_layers", "target_layer_ids", "mask_token_id"]
    if given.selector_rank:
        keys += ["selector_rank", "conv_kernel_size", "conv_group_size"]
    for key in keys:
        if ours[key] != theirs[key]:
            raise CheckpointError(
                f"the drafter to start from has {key} = {theirs[key]}, this run {ours[key]}"
            )
