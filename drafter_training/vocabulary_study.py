"""How many of the target's tokens a drafter needs: τ lost against time won."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.checkpoint import load_drafter
from draft_service.shortlist import build_shortlist
from drafter_training.acceptance import Tau, walk_tau
from drafter_training.blocks import BlockRule
from drafter_training.drafter import target_head
from drafter_training.shards import ShardFolder
from drafter_training.workspace import Workspace
from flashduet.models import text_config
from flashduet.packed_linear import PackedLinear, can_pack

_TIMED_PASSES = 20


@dataclass(frozen=True)
class ShortlistRow:
    """size: tokens drafted from. covered: share of the held-out answers' tokens that are among
    them. head_ms: of one block's head on this machine."""

    size: int
    covered: float
    tau: float
    head_ms: float


class VocabularyStudy:
    """Shortlists by the tokens' counts in training answers, judged on held-out greedy answers."""

    def __init__(self, workspace: Workspace, data: list[Path], drafter: Path, most: int) -> None:
        """most: held-out answers looked at."""
        self._network = load_drafter(drafter, dtype=torch.bfloat16)
        self._head = target_head(workspace.target)
        self._end = {int(i) for i in _ends(workspace)}
        folders = [ShardFolder(folder) for folder in data]
        self._dataset, _ = workspace.dataset(folders)
        held_out = self._dataset.held_out(workspace.preset.train.held_out_share)
        greedy = [i for i in held_out if self._dataset[i].greedy]
        self._chosen = (greedy or held_out)[:most]
        vocabulary = text_config(workspace.target.config).vocab_size
        counts = self._dataset.token_counts(vocabulary)
        for index in held_out:
            sequence = self._dataset[index]
            answer = torch.tensor(sequence.token_ids[sequence.prompt_length :])
            counts -= torch.bincount(answer, minlength=vocabulary)
        self._counts = counts

    def shortlist(self, size: int) -> torch.Tensor:
        """Ascending ids, those that end an answer always among them."""
        return build_shortlist(self._counts, size, self._end)

    def rows(self, sizes: list[int]) -> Iterator[ShortlistRow]:
        """One a size; 0 is the whole vocabulary."""
        config = self._network.config
        rule = BlockRule(config.block_length, config.mask_token_id, anchors=0)
        for size in sizes:
            ids = self.shortlist(size) if size else None
            total, inside, tokens = Tau(), 0, 0
            for index in self._chosen:
                batch = self._dataset.load([index])
                total = total + walk_tau(self._network, batch, self._head, rule, ids)[0]
                sequence = self._dataset[index]
                answer = torch.tensor(sequence.token_ids[sequence.prompt_length :])
                inside += len(answer) if ids is None else int(torch.isin(answer, ids).sum())
                tokens += len(answer)
            count = size or len(self._counts)
            yield ShortlistRow(count, inside / max(tokens, 1), total.value, self._head_ms(ids))

    def _head_ms(self, ids: torch.Tensor | None) -> float:
        weights = self._head.head if ids is None else self._head.head[ids]
        block = torch.randn(self._network.config.block_length - 1, weights.shape[1])
        block = block.to(weights.dtype)
        with torch.inference_mode():
            product = (
                PackedLinear([weights])
                if can_pack(weights.dtype, weights.device)
                else lambda x: torch.nn.functional.linear(x, weights)
            )
            product(block)
            began = time.perf_counter()
            for _ in range(_TIMED_PASSES):
                product(block)
        return (time.perf_counter() - began) / _TIMED_PASSES * 1e3


def _ends(workspace: Workspace) -> list[int]:
    ends = workspace.target.generation_config.eos_token_id
    if ends is None:
        ends = text_config(workspace.target.config).eos_token_id
    return ends if isinstance(ends, list) else [ends]
