"""The law of what is emitted: exactly the target's filtered softmax, jointly over positions.

Pearson's chi-square on fixed seeds; p below 1e-4 fails. A speculative walk must give the same
tokens whatever the drafter, and so the same law.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from flashduet.sampling.choose import RowKey, choose_draft_rows, choose_rows, choose_tokens
from flashduet.sampling.params import Sampling
from tests.unit import sampling_reference as reference
from tests.unit.sampling_reference import chi_square_p

LEAST_P = 1e-4
WIDTH = 5

FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 60, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 0.3},
]


class Chain:
    """A little model: logits over WIDTH tokens that depend on the last token and the position."""

    def __init__(self, seed: int, spread: float = 1.2) -> None:
        rng = np.random.default_rng(seed)
        self.table = rng.normal(size=(16, WIDTH, WIDTH)).astype(np.float32) * np.float32(spread)

    def logits(self, positions: int | list[int], last: np.ndarray | list[int]) -> torch.Tensor:
        """For the tokens of `positions`, given those before them: [n, WIDTH]."""
        return torch.from_numpy(self.table[positions, last])

    def mixed_with(self, other: Chain, share: float) -> Chain:
        chain = Chain(0)
        chain.table = ((1 - share) * self.table + share * other.table).astype(np.float32)
        return chain

    def law(self, sampling: Sampling, length: int) -> np.ndarray:
        """Probability of every sequence of `length` tokens after token 0: [WIDTH] * length."""
        law = np.zeros((WIDTH,) * length)
        for tokens in itertools.product(range(WIDTH), repeat=length):
            p, last = 1.0, 0
            for position, token in enumerate(tokens):
                p *= reference.probabilities(self.table[position][last], sampling)[token]
                last = token
            law[tokens] = p
        return law


TARGET = Chain(1)


def counts_of(sequences: np.ndarray) -> np.ndarray:
    """Counts of rows of [n, length]: [WIDTH] * length."""
    table = np.zeros((WIDTH,) * sequences.shape[1])
    np.add.at(table, tuple(sequences.T), 1)
    return table


def sample_alone(keys: list[tuple[int, int]], filters: dict[str, float], length: int) -> np.ndarray:
    """Plain autoregression of TARGET for each (seed, choice): [n, length]."""
    samplings = [Sampling(**filters, seed=seed) for seed, _ in keys]
    last, sequences = np.zeros(len(keys), dtype=int), []
    for position in range(length):
        rows = [RowKey(position, s, choice) for s, (_, choice) in zip(samplings, keys, strict=True)]
        last = np.array(choose_rows(TARGET.logits(position, last), rows).tokens)
        sequences.append(last)
    return np.stack(sequences, axis=1)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_one_position_has_the_filtered_softmax(filters):
    row = (np.random.default_rng(3).normal(size=300) * 2).astype(np.float32)
    sampling, count = Sampling(**filters, seed=5), 15_000
    tokens = choose_tokens(torch.from_numpy(row).expand(count, -1), 0, sampling).tokens
    expected = reference.probabilities(row, sampling) * count
    assert chi_square_p(np.bincount(tokens, minlength=300), expected) > LEAST_P


@pytest.mark.parametrize(
    "filters", [{"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9}], ids=str
)
def test_a_whole_vocabulary_has_the_filtered_softmax(filters):
    """Tokens put into 64 classes of equal probability in order of likelihood."""
    row = np.random.default_rng(4).normal(size=49_152).astype(np.float32) * 2
    sampling = Sampling(**filters, seed=6)
    p = reference.probabilities(row, sampling)
    order = np.argsort(-p, kind="stable")
    classes = np.empty(len(p), dtype=int)
    classes[order] = np.minimum(np.cumsum(p[order]) * 64, 63).astype(int)
    tokens = [
        token
        for start in range(0, 3200, 16)
        for token in choose_tokens(torch.from_numpy(row).expand(16, -1), start, sampling).tokens
    ]
    expected = np.bincount(classes, weights=p, minlength=64) * len(tokens)
    assert chi_square_p(np.bincount(classes[tokens], minlength=64), expected) > LEAST_P
    assert p[tokens].min() > 0


@pytest.mark.parametrize("filters", FILTERS[:3], ids=str)
@pytest.mark.parametrize("consecutive", ["seeds", "choices"])
def test_three_positions_have_the_joint_law(filters, consecutive):
    count = 30_000
    keys = [(i, 0) if consecutive == "seeds" else (99, i) for i in range(count)]
    sequences = sample_alone(keys, filters, 3)
    law = TARGET.law(Sampling(**filters), 3)
    assert chi_square_p(counts_of(sequences), law * count) > LEAST_P


@pytest.mark.parametrize("consecutive", ["seeds", "choices"])
@pytest.mark.parametrize("lag", [1, 2])
def test_answers_of_near_keys_are_independent(consecutive, lag):
    """First two tokens of one answer against the first two of the next, in disjoint pairs."""
    filters, count = {"temperature": 1.0}, 40_000
    keys = [(i, 0) if consecutive == "seeds" else (99, i) for i in range(count)]
    sequences = sample_alone(keys, filters, 2).reshape(-1, 2, lag, 2)
    pairs = np.concatenate([sequences[:, 0], sequences[:, 1]], axis=-1).reshape(-1, 4)
    law = TARGET.law(Sampling(**filters), 2)
    expected = np.multiply.outer(law, law) * len(pairs)
    assert chi_square_p(counts_of(pairs), expected) > LEAST_P


# ---- speculation


@dataclass
class Walk:
    """A request: what it emitted so far, and how its rounds went."""

    sampling: Sampling
    choice: int
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0

    def key(self, position: int) -> RowKey:
        return RowKey(position, self.sampling, self.choice)


def speculate(drafter: Chain | None, walks: list[Walk], length: int, block: int) -> list[Walk]:
    """The decode loop in small: propose, verify, accept iff equal, bonus.

    Each round packs the rows of all unfinished walks, wherever each one is by now.
    """
    keys = [walk.key(0) for walk in walks]
    first = choose_rows(TARGET.logits([0] * len(walks), [0] * len(walks)), keys).tokens
    for walk, token in zip(walks, first, strict=True):
        walk.tokens = [token]
    while going := [walk for walk in walks if len(walk.tokens) < length]:
        blocks = [[walk.tokens[-1]] for walk in going]  # anchor, then the drafts
        for i in range(block - 1 if drafter else 0):
            drafting = [n for n, walk in enumerate(going) if len(walk.tokens) + i < length - 1]
            positions = [len(going[n].tokens) + i for n in drafting]
            logits = drafter.logits(positions, [blocks[n][-1] for n in drafting])
            keys = [going[n].key(position) for n, position in zip(drafting, positions, strict=True)]
            for n, token in zip(drafting, choose_draft_rows(logits, keys).tokens, strict=True):
                blocks[n].append(token)
        positions = [
            len(walk.tokens) + i
            for walk, block_tokens in zip(going, blocks, strict=True)
            for i in range(len(block_tokens))
        ]
        keys = [
            walk.key(len(walk.tokens) + i)
            for walk, block_tokens in zip(going, blocks, strict=True)
            for i in range(len(block_tokens))
        ]
        logits = TARGET.logits(positions, [token for tokens in blocks for token in tokens])
        chosen = iter(choose_rows(logits, keys).tokens)
        for walk, (_, *drafts) in zip(going, blocks, strict=True):
            own = [next(chosen) for _ in range(len(drafts) + 1)]
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == own[accepted]:
                accepted += 1
            walk.tokens += own[: accepted + 1]
            walk.accepted += accepted
            walk.rejected += accepted < len(drafts)
    return walks


DRAFTERS = {
    "near": TARGET.mixed_with(Chain(2), 0.3),
    "far": Chain(3),
    "wrong": TARGET.mixed_with(TARGET, 2.0).mixed_with(Chain(5), 2.0),
    "perfect": TARGET,
}


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, *FILTERS[:3]], ids=str)
def test_output_does_not_depend_on_the_drafter_or_the_block_length(filters):
    def walks() -> list[Walk]:
        keys = itertools.product(range(30), range(2))
        return [Walk(Sampling(**filters, seed=seed), choice) for seed, choice in keys]

    alone = [walk.tokens for walk in speculate(None, walks(), 14, 1)]
    for drafter, block in itertools.product(DRAFTERS.values(), (2, 3, 5, 8)):
        assert [walk.tokens for walk in speculate(drafter, walks(), 14, block)] == alone
    # The same noise makes the same model's guess the sample itself.
    assert all(walk.rejected == 0 for walk in speculate(TARGET, walks(), 14, 5))


@pytest.mark.parametrize("name", ["near", "far"])
@pytest.mark.parametrize("consecutive", ["seeds", "choices"])
def test_a_speculative_walk_has_the_targets_joint_law(name, consecutive):
    """Over four positions, across accepted and rejected drafts."""
    filters, count = {"temperature": 0.8, "top_p": 0.95}, 10_000
    if consecutive == "seeds":
        walks = [Walk(Sampling(**filters, seed=seed), 0) for seed in range(count)]
    else:
        walks = [Walk(Sampling(**filters, seed=12), choice) for choice in range(count)]
    speculate(DRAFTERS[name], walks, 4, 3)
    accepted = sum(walk.accepted for walk in walks)
    rejected = sum(walk.rejected for walk in walks)
    assert min(accepted, rejected) > count / 4  # both ways are well travelled
    law = TARGET.law(Sampling(**filters), 4)
    counts = counts_of(np.array([walk.tokens for walk in walks]))
    assert chi_square_p(counts, law * count) > LEAST_P
