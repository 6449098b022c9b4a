"""Reads the shards that ``data`` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from drafter_training.data import MANIFEST


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right to the longest.

    tokens: int64 [N, T]. lengths, prompt_lengths: int64 [N]. features: bfloat16 [N, T, n H].
    final_states: bfloat16 [N, T, H], the target's last normed state.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    features: torch.Tensor
    final_states: torch.Tensor


@dataclass(frozen=True)
class _Place:
    shard: int
    start: int
    length: int
    prompt_length: int


class ShardDataset:
    """Token shards in memory; features stay on disk and are read a sequence at a time."""

    def __init__(self, folders: list[Path], hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._tokens: list[torch.Tensor] = []
        self._features: list[Any] = []
        self._places: list[_Place] = []
        taps = set()
        for folder in folders:
            manifest = json.loads((folder / MANIFEST).read_text())
            taps.add(tuple(manifest["settings"]["target_layer_ids"]))
            for shard in manifest["shards"]:
                self._add(folder, shard["name"])
        if len(taps) != 1:
            raise ValueError(f"the data folders must tap the same target layers, found {taps}")
        self.target_layer_ids = list(taps.pop())

    def _add(self, folder: Path, name: str) -> None:
        arrays = load_file(folder / f"tokens-{name}")
        features = safe_open(folder / f"features-{name}", framework="pt")
        shard, start = len(self._tokens), 0
        lengths = arrays["lengths"].tolist()
        for length, prompt in zip(lengths, arrays["prompt_lengths"].tolist(), strict=True):
            self._places.append(_Place(shard, start, length, prompt))
            start += length
        self._tokens.append(arrays["tokens"].long())
        self._features.append(features.get_slice("features"))

    def __len__(self) -> int:
        return len(self._places)

    def token_counts(self, vocabulary: int) -> torch.Tensor:
        """How often each token occurs, int64 [V]."""
        return torch.bincount(torch.cat(self._tokens), minlength=vocabulary)

    def held_out(self, count: int) -> list[int]:
        """Evenly spaced sequences, for validation."""
        if not count:
            return []
        return list(range(0, len(self), max(1, len(self) // count)))[:count]

    def batches(self, epoch: int, size: int, seed: int, without: list[int]) -> list[list[int]]:
        """The epoch's batches, a function of (seed, epoch) alone; like lengths go together."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        skipped = set(without)
        order = torch.randperm(len(self), generator=generator).tolist()
        order = [i for i in order if i not in skipped]
        window = 64 * size
        batches: list[list[int]] = []
        for first in range(0, len(order), window):
            chunk = sorted(order[first : first + window], key=lambda i: self._places[i].length)
            batches.extend(chunk[i : i + size] for i in range(0, len(chunk), size))
        mixed = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in mixed]

    def load(self, indices: list[int]) -> Batch:
        places = [self._places[i] for i in indices]
        longest = max(place.length for place in places)
        tokens = torch.zeros(len(places), longest, dtype=torch.int64)
        rows = []
        for row, place in enumerate(places):
            end = place.start + place.length
            tokens[row, : place.length] = self._tokens[place.shard][place.start : end]
            rows.append(self._features[place.shard][place.start : end])
        states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Batch(
            tokens,
            torch.tensor([place.length for place in places]),
            torch.tensor([place.prompt_length for place in places]),
            states[..., : -self._hidden_size],
            states[..., -self._hidden_size :],
        )
