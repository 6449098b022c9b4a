"""A drafter's acceptance length on given answers, teacher forced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.checkpoint import load_drafter
from draft_service.shortlist import read_shortlist
from drafter_training.acceptance import agreed, every_draft, walk
from drafter_training.blocks import BlockRule
from drafter_training.dataset import Batch
from drafter_training.drafter import target_head
from drafter_training.features import compute_features
from drafter_training.shards import Sequence
from drafter_training.target import load_target
from flashduet.errors import InvalidRequest


@dataclass(frozen=True)
class Scored:
    """Rounds of one answer: tokens committed by each, bonus included."""

    rounds: list[int]


def batch_of(sequences: list[Sequence], rows: list[torch.Tensor], hidden_size: int) -> Batch:
    """One batch of sequences whose feature rows [tokens, (n + 1) H] are there."""
    states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    tokens = [torch.tensor(sequence.token_ids) for sequence in sequences]
    return Batch(
        torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        torch.tensor([len(sequence.token_ids) for sequence in sequences]),
        torch.tensor([sequence.prompt_length for sequence in sequences]),
        states[..., :-hidden_size],
        states[..., -hidden_size:],
    )


def score_answers(
    target_folder: Path,
    drafter: Path,
    sequences: list[Sequence],
    *,
    dtype: torch.dtype = torch.float32,
    block_length: int | None = None,
) -> list[Scored]:
    """Walks every answer with the drafter's blocks, one sequence at a time, drafted as served: from
    the shortlist, where one lies beside the drafter.

    Args:
        block_length: verify so many of the block, anchor included; None: all of it.

    Raises:
        InvalidRequest: a sequence has no answer to walk.
    """
    target = load_target(target_folder, dtype)
    network = load_drafter(drafter, dtype=dtype)
    config, head = network.config, target_head(target, dtype)
    rule = BlockRule(config.block_length, config.mask_token_id, anchors=0)
    shortlist = read_shortlist(drafter, len(head.head))
    slots = (block_length or config.block_length) - 1
    results = []
    for index, sequence in enumerate(sequences):
        if sequence.answer_tokens < 2:
            raise InvalidRequest(f"answers[{index}]", sequence.answer_tokens, "2 tokens at least")
        rows = compute_features(target, list(config.target_layer_ids), [sequence])
        batch = batch_of([sequence], rows, config.hidden_size)
        blocks, drafts = every_draft(network, batch, head, rule, shortlist)
        counts = agreed(drafts[..., :slots], blocks.labels[..., :slots])[0].tolist()
        results.append(Scored([n for _, n in walk(counts, sequence.answer_tokens)]))
    return results
