"""The reference figure of the draft service's start-up self test, beside the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from draft_service.self_test import SELF_TEST_FILE, SelfTest
from drafter_training.acceptance import walk_tau
from drafter_training.dataset import ShardDataset
from drafter_training.trainer import Trainer

_LOOKED_AT = 8


def write_self_test(drafter: Path, trainer: Trainer, dataset: ShardDataset) -> None:
    """Prompt and greedy continuation of a held-out sequence, and the τ to be seen on them."""
    greedy = [index for index in trainer.held_out if dataset[index].greedy]
    if not greedy:
        return
    index = max(greedy[:_LOOKED_AT], key=lambda i: dataset[i].answer_tokens)
    sequence = dataset[index]
    batch = dataset.load([index])
    tau = walk_tau(trainer.network, batch, trainer.target, trainer.blocks)[0]
    facts = SelfTest(
        prompt_token_ids=sequence.token_ids[: sequence.prompt_length],
        continuation=sequence.token_ids[sequence.prompt_length :],
        expected_tau=round(tau.value, 3),
        block_length=trainer.network.config.block_length,
    )
    path = drafter / SELF_TEST_FILE
    written = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(written | {"self_test": facts.model_dump()}) + "\n")
