"""A drafter's acceptance length on given answers, teacher forced."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from draft_service.checkpoint import load_drafter
from draft_service.lookup import continued, look_up
from draft_service.shortlist import read_shortlist
from draft_service.work import Drafts
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
    """Rounds of one answer: tokens committed by each, bonus included.

    alone: by the drafter alone, where the rounds are with what is copied from the text.
    """

    rounds: list[int]
    alone: list[int]


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
    lookup: int = 0,
) -> list[Scored]:
    """Walks every answer with the drafter's blocks, one sequence at a time, drafted as served: from
    the shortlist, where one lies beside the drafter.

    Args:
        block_length: verify so many of the block, anchor included; None: all of it.
        lookup: tokens that must repeat to be copied, as the draft service is told; 0: never.

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
        copied = with_copies(counts, drafts[0, :, :slots].tolist(), sequence, lookup)
        results.append(
            Scored(*(_rounds(accepted, sequence.answer_tokens) for accepted in (copied, counts)))
        )
    return results


def _rounds(accepted: list[int], answer_tokens: int) -> list[int]:
    return [committed for _, committed in walk(accepted, answer_tokens)]


def with_copies(
    counts: list[int], drafts: list[list[int]], sequence: Sequence, lookup: int
) -> list[int]:
    """Right drafts of the block at each offset, where the text's own repetition goes first.

    Args:
        counts: of the drafter, from the answer's first token on; those past its end, where a batch
            has longer ones, are left out.
        drafts: the drafter's, of as many blocks.
        lookup: tokens that must repeat, as the draft service is told; 0: none.
    """
    if not lookup:
        return counts
    text, result = array("q", sequence.token_ids), []
    for offset, block in enumerate(drafts[: sequence.answer_tokens]):
        place = sequence.prompt_length + offset
        before, anchor = text[:place], text[place]
        mine = Drafts(block, [0.0] * len(block))
        proposed = look_up(before, anchor, len(block), lookup)
        if proposed is None:
            proposed = continued(before, anchor, mine, lookup)
        pairs = zip(proposed.token_ids, text[place + 1 :], strict=False)
        result.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return result
