"""A tiny target with shards of random tokens, and trainers over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from draft_service.config import DrafterConfig
from draft_service.network import DFlashNetwork
from drafter_training.blocks import BlockRule
from drafter_training.checkpoint import warm_start
from drafter_training.dataset import ShardDataset
from drafter_training.drafter import drafter_config, target_head
from drafter_training.feature_cache import FeatureCache
from drafter_training.features import FeatureSource
from drafter_training.objective import Objective, ObjectiveSettings
from drafter_training.shards import Sequence, ShardFolder
from drafter_training.trainer import Trainer, TrainSettings

VOCABULARY, HIDDEN, BLOCK, TAPS, MASK = 64, 32, 4, [0, 1], 3
RULE = BlockRule(BLOCK, MASK, anchors=4, short_share=0.5)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_network(target: LlamaForCausalLM, layers: int = 2) -> DFlashNetwork:
    torch.manual_seed(1)
    config = drafter_config(
        target, layers=layers, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=TAPS
    )
    network = DFlashNetwork(DrafterConfig.from_qwen3(config))
    warm_start(network, target, [0, 2][:layers], 1)
    return network


def random_sequences(count: int, length: int = 24, prompt: int = 6) -> list[Sequence]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCABULARY, (count, length), generator=generator).tolist()
    return [Sequence(row, prompt, greedy=True) for row in rows]


def make_dataset(folder: Path, target: LlamaForCausalLM, sequences: int = 10) -> ShardDataset:
    shards = ShardFolder(folder / "data", {"target": "tiny"})
    if not len(shards):
        shards.write(0, random_sequences(sequences))
    cache = FeatureCache(folder / "features", "tiny", TAPS, 1 << 20)
    features = FeatureSource(TAPS, cache, lambda: target)
    features.prepare([shards])
    return ShardDataset([shards], features, HIDDEN)


def make_trainer(
    dataset: ShardDataset,
    target: LlamaForCausalLM,
    folder: Path,
    accelerator: Accelerator | None = None,
    **changes: object,
) -> Trainer:
    settings = TrainSettings(
        epochs=3, batch_size=3, held_out_share=0.2, learning_rate=1e-2, checkpoint_seconds=1e9
    )
    objective = Objective(
        make_network(target),
        target_head(target, torch.float32),
        dataset.token_counts(VOCABULARY),
        ObjectiveSettings(RULE, common_tokens=16, random_tokens=8),
    )
    config = drafter_config(
        target, layers=2, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=TAPS
    )
    changed = replace(settings, **changes)  # type: ignore[arg-type]
    return Trainer(objective, config, dataset, folder, changed, accelerator)
