"""Token shards as batches for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafter_training.features import FeatureSource
from drafter_training.shards import Sequence, ShardError, ShardFolder, prompt_digest

_RANKS = float(1 << 64)


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
    """A sequence, and where its rows are: the start-th and following of the shard's."""

    digest: str
    start: int
    sequence: Sequence


class ShardDataset:
    """All tokens in memory; features come from their source, a batch at a time."""

    def __init__(
        self, folders: list[ShardFolder], features: FeatureSource, hidden_size: int
    ) -> None:
        self._features, self._hidden_size = features, hidden_size
        self._places: list[_Place] = []
        targets = {folder.facts.get("target") for folder in folders}
        if len(targets) > 1:
            raise ShardError("the data folders hold answers of different targets")
        for folder in folders:
            for number in folder.numbers:
                digest, start = folder[number].sha256, 0
                for sequence in folder.read(number):
                    self._places.append(_Place(digest, start, sequence))
                    start += len(sequence.token_ids)
        if not self._places:
            raise ShardError("the data folders hold no sequences")

    @property
    def layer_ids(self) -> list[int]:
        """Tapped target layers of the features."""
        return self._features.layer_ids

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sequence:
        return self._places[index].sequence

    @property
    def answer_tokens(self) -> int:
        return sum(place.sequence.answer_tokens for place in self._places)

    def token_counts(self, vocabulary: int) -> torch.Tensor:
        """How often each token occurs in the answers, int64 [V]."""
        counts = torch.zeros(vocabulary, dtype=torch.int64)
        for place in self._places:
            sequence = place.sequence
            answer = torch.tensor(sequence.token_ids[sequence.prompt_length :], dtype=torch.int64)
            counts += torch.bincount(answer, minlength=vocabulary)
        return counts

    def held_out(self, share: float) -> list[int]:
        """About this share of the sequences, and at least one, by the hash of the prompt.

        Whether a sequence is held out hangs on itself alone, so it stays so as the data grow. In
        ascending order of the hash: the first so many are a stable sample.
        """
        ranked = sorted(range(len(self)), key=self._rank)
        chosen = [i for i in ranked if self._rank(i) < share * _RANKS]
        return chosen or ranked[: 1 if len(self) > 1 else 0]

    def _rank(self, index: int) -> int:
        sequence = self[index]
        return int.from_bytes(prompt_digest(sequence.token_ids[: sequence.prompt_length]), "big")

    def batches(self, epoch: int, size: int, seed: int, without: list[int]) -> list[list[int]]:
        """The epoch's batches, a function of (seed, epoch) alone; like lengths go together."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        skipped = set(without)
        order = torch.randperm(len(self), generator=generator).tolist()
        order = [i for i in order if i not in skipped]
        window = 64 * size
        batches: list[list[int]] = []
        for first in range(0, len(order), window):
            chunk = sorted(order[first : first + window], key=lambda i: len(self[i].token_ids))
            batches.extend(chunk[i : i + size] for i in range(0, len(chunk), size))
        mixed = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in mixed]

    def load(self, indices: list[int]) -> Batch:
        places = [self._places[i] for i in indices]
        rows = [self._features.rows(p.digest, p.start, p.sequence) for p in places]
        tokens = [torch.tensor(p.sequence.token_ids) for p in places]
        states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Batch(
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
            torch.tensor([len(p.sequence.token_ids) for p in places]),
            torch.tensor([p.sequence.prompt_length for p in places]),
            states[..., : -self._hidden_size],
            states[..., -self._hidden_size :],
        )
