"""Running the studies: answers for them, and tables of what was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.checkpoint import load_drafter
from draft_service.network import DFlashNetwork
from draft_service.shortlist import read_shortlist
from drafter_training.acceptance import Tau, agreed, every_draft, walk
from drafter_training.blocks import BlockRule
from drafter_training.data_command import make_data
from drafter_training.dataset import Batch
from drafter_training.drafter import target_head
from drafter_training.features import compute_features
from drafter_training.generation import DataSettings
from drafter_training.objective import TargetHead
from drafter_training.scoring import batch_of, with_copies
from drafter_training.shards import Sequence
from drafter_training.studies import Cascade, SlotTally, compare_rules, second_pass
from drafter_training.target import load_target
from flashduet.errors import ConfigurationError

_BATCH = 4


@dataclass(frozen=True)
class StudyData:
    """How many answers a study looks at, how long they are, and where they are kept."""

    folder: Path
    sequences: int = 64
    answer_tokens: int = 96
    seed: int = 1_000_003


class Study:
    """A target, a drafter, and answers that neither was trained on."""

    def __init__(self, target_folder: Path, drafter: Path, data: StudyData) -> None:
        self._target_folder, self._data = target_folder, data
        dtype = torch.bfloat16
        self._target = load_target(target_folder, dtype)
        self._network: DFlashNetwork = load_drafter(drafter, dtype=dtype)
        self._head: TargetHead = target_head(self._target, dtype)
        self._shortlist = read_shortlist(drafter, len(self._head.head))
        config = self._network.config
        self._rule = BlockRule(config.block_length, config.mask_token_id, anchors=0)

    def sampling(self, temperature: float) -> dict[str, float]:
        """Tokens a round by rule; at temperature 0 all rules are the same."""
        if temperature == 0:
            tally = SlotTally()
            for batch in self._batches(0.0):
                blocks, drafts = every_draft(self._network, batch, self._head, self._rule)
                tally.add((drafts == blocks.labels)[blocks.valid].float())
            return {"greedy drafts": tally.tau}
        tallies: dict[str, SlotTally] = {}
        generator = torch.Generator().manual_seed(self._data.seed)
        for batch in self._batches(temperature):
            kept = compare_rules(
                self._network, batch, self._head, self._rule, temperature, generator
            )
            for name, values in kept.items():
                tallies.setdefault(name, SlotTally()).add(values)
        return {name: tally.tau for name, tally in tallies.items()}

    def slots(self, keeps: list[int]) -> tuple[Cascade, dict[str, float]]:
        """On greedy answers: what stands behind the first miss; τ of decoding by second passes.

        keeps: how many drafts stand before a second pass guesses the others again; 0 is one pass.

        Raises:
            ConfigurationError: more than a block has.
        """
        drafts_each = self._rule.length - 1
        if max(keeps) > drafts_each:
            raise ConfigurationError(
                f"--keep: {max(keeps)} given, but this drafter drafts {drafts_each} tokens a block"
            )
        cascade = Cascade.of(self._rule.length - 1)
        taus = {keep: Tau() for keep in [0, *keeps]}
        for batch in self._batches(0.0):
            blocks, drafts = every_draft(self._network, batch, self._head, self._rule)
            cascade.add(drafts[blocks.valid], blocks.labels[blocks.valid])
            for keep in taus:
                if keep:
                    counts = second_pass(
                        self._network, batch, self._head, blocks, drafts, keep
                    ).tolist()
                else:
                    counts = agreed(drafts, blocks.labels).tolist()
                for row, answer in enumerate((batch.lengths - batch.prompt_lengths).tolist()):
                    rounds = [n for _, n in walk(counts[row], answer)]
                    taus[keep] = taus[keep] + Tau(sum(rounds), len(rounds))
        return cascade, {str(keep): tau.value for keep, tau in taus.items()}

    def lookup(self, leasts: list[int]) -> dict[str, float]:
        """τ of greedy answers by how many tokens must repeat to be copied; 0: no copies.

        Drafted as served, from the shortlist if one lies beside the drafter.
        """
        taus = {least: Tau() for least in leasts}
        for batch, part in zip(self._batches(0.0), self._parts(0.0), strict=True):
            blocks, drafts = every_draft(
                self._network, batch, self._head, self._rule, self._shortlist
            )
            counts = agreed(drafts, blocks.labels).tolist()
            for accepted, own, sequence in zip(counts, drafts.tolist(), part, strict=True):
                for least in leasts:
                    right = with_copies(accepted, own, sequence, least)
                    rounds = [n for _, n in walk(right, sequence.answer_tokens)]
                    taus[least] = taus[least] + Tau(sum(rounds), len(rounds))
        return {str(least): tau.value for least, tau in taus.items()}

    def _parts(self, temperature: float) -> list[list[Sequence]]:
        sequences = self._answers(temperature)
        return [sequences[first : first + _BATCH] for first in range(0, len(sequences), _BATCH)]

    def _batches(self, temperature: float) -> Iterator[Batch]:
        layers = list(self._network.config.target_layer_ids)
        for part in self._parts(temperature):
            rows = compute_features(self._target, layers, part)
            yield batch_of(part, rows, self._network.config.hidden_size)

    def _answers(self, temperature: float) -> list[Sequence]:
        """Made on the first call: prompts that no training saw, answers at this temperature."""
        data = self._data
        settings = DataSettings(
            file_share=0.0,
            greedy_share=1.0 if temperature == 0 else 0.0,
            answer_temperatures=(temperature,) if temperature else (1.0,),
            min_p=0.0,
            max_answer_tokens=data.answer_tokens,
            max_length=data.answer_tokens + 256,
            shard_sequences=data.sequences,
            seed=data.seed,
        )
        shards = make_data(
            self._target_folder,
            data.folder / f"temperature-{temperature:g}",
            settings,
            prompt_files=[],
            answer_tokens=1,
            slots=min(64, data.sequences),
        )
        return shards.read(shards.numbers[0])
