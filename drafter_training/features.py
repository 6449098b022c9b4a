"""Context features of token shards, from the cache or from the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from drafter_training.feature_cache import FeatureCache
from drafter_training.shards import Sequence, ShardFolder

_BATCH_TOKENS = 4096
"""Tokens in one pass of the target, padding included."""


@torch.inference_mode()
def compute_features(
    target: PreTrainedModel, layer_ids: list[int], sequences: list[Sequence]
) -> list[torch.Tensor]:
    """[tokens, (n + 1) H] of each, in the target's type: the tapped layers, the final state."""
    rows: dict[int, torch.Tensor] = {}
    for indices in _batches(sequences):
        longest = len(sequences[indices[-1]].token_ids)
        tokens = torch.zeros(len(indices), longest, dtype=torch.int64)
        for row, index in enumerate(indices):
            ids = sequences[index].token_ids
            tokens[row, : len(ids)] = torch.tensor(ids)
        # Padding stands on the right, where causal attention hides it.
        states = target(
            tokens.to(target.device), output_hidden_states=True, use_cache=False, logits_to_keep=1
        ).hidden_states
        tapped = [states[i + 1] for i in layer_ids] + [states[-1]]
        joined = torch.cat(tapped, -1).cpu()
        for row, index in enumerate(indices):
            rows[index] = joined[row, : len(sequences[index].token_ids)].clone()
    return [rows[index] for index in range(len(sequences))]


def _batches(sequences: list[Sequence]) -> Iterable[list[int]]:
    """Indices, ascending by length, so that like lengths share a pass."""
    batch: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: len(sequences[i].token_ids)):
        if batch and len(sequences[index].token_ids) * (len(batch) + 1) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class FeatureSource:
    """Rows of shards by hash: mapped from the cache, or computed when they are asked for."""

    def __init__(
        self, layer_ids: list[int], cache: FeatureCache, target: Callable[[], PreTrainedModel]
    ) -> None:
        """target: loads the target, called once and only if something must be computed."""
        self.layer_ids = layer_ids
        self._cache, self._load = cache, target
        self._target: PreTrainedModel | None = None
        self._mapped: dict[str, Any] = {}

    def prepare(
        self, folders: list[ShardFolder], report: Callable[[int, int], None] = lambda *_: None
    ) -> int:
        """Fills the cache as far as it goes; the number of shards left to be computed each time.

        report: told (shards done, shards in all).
        """
        shards = [(folder, number) for folder in folders for number in folder.numbers]
        left = 0
        for done, (folder, number) in enumerate(shards):
            digest = folder[number].sha256
            if not self._cache.path(digest).exists():
                if left:
                    left += 1
                    continue
                rows = self.compute(folder.read(number))
                left += not (rows and self._cache.keep(digest, torch.cat(rows)))
            report(done + 1, len(shards))
        return left

    def rows(self, digest: str, start: int, sequence: Sequence) -> torch.Tensor:
        """bfloat16 [tokens, (n + 1) H] of the sequence that starts at the shard's start-th."""
        if digest not in self._mapped:
            path = self._cache.path(digest)
            self._mapped[digest] = (
                safe_open(path, framework="pt").get_slice("features") if path.exists() else None
            )
        mapped = self._mapped[digest]
        if mapped is None:
            return self.compute([sequence])[0]
        return mapped[start : start + len(sequence.token_ids)]

    def compute(self, sequences: list[Sequence]) -> list[torch.Tensor]:
        if self._target is None:
            self._target = self._load()
        rows = compute_features(self._target, self.layer_ids, sequences)
        return [row.to(torch.bfloat16) for row in rows]


class SomeFeatures(FeatureSource):
    """A choice of another source's tapped layers, for comparing how many are needed."""

    def __init__(self, whole: FeatureSource, chosen: list[int], hidden_size: int) -> None:
        """chosen: indices into the other source's layers, ascending."""
        self._whole = whole
        self.layer_ids = [whole.layer_ids[i] for i in chosen]
        kept = [*chosen, len(whole.layer_ids)]
        self._columns = torch.cat(
            [torch.arange(i * hidden_size, (i + 1) * hidden_size) for i in kept]
        )

    def rows(self, digest: str, start: int, sequence: Sequence) -> torch.Tensor:
        return self._whole.rows(digest, start, sequence)[:, self._columns]
