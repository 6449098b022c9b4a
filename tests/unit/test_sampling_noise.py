"""The noise: the same bits always and everywhere, standard Gumbel, and independent in every key.

Statistical tests run on fixed keys, so each passes for good or fails for good; a p-value below
1e-4 fails, and correlations of N pairs fail beyond 5 / sqrt(N) (p < 1e-6 each).
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashduet.sampling import elementary, noise
from flashduet.sampling.noise import GROUP, exponentials, gumbel, row_keys
from tests.unit import sampling_reference as reference
from tests.unit.sampling_reference import chi_square_p

WORDS = st.integers(0, 2**64 - 1)
GOLDEN = ["0x1.73de3c68d2e44p-2", "-0x1.bb378ecd24a5ep-1", "-0x1.1369824e07693p-1"]


def uniforms(seeds=(0,), choices=(0,), positions=(0,), tokens=(0,)) -> np.ndarray:
    """exp(-E), uniform in (0, 1): [seeds, choices, positions, tokens]."""
    keys = row_keys(*zip(*itertools.product(seeds, choices, positions), strict=True))
    values = np.exp(-exponentials(keys[:, None], np.asarray(tokens)[None, :]))
    return values.reshape(len(seeds), len(choices), len(positions), len(tokens))


# ---- the same bits


@settings(max_examples=200)
@given(seed=WORDS, choice=st.integers(0, 2**32 - 1), position=st.integers(0, 2**32 - 1))
def test_noise_is_the_documented_hash(seed, choice, position):
    tokens = [0, 1, 127, 128, 49_151, 262_143]
    expected = [reference.gumbel(seed, choice, position, token) for token in tokens]
    found = gumbel(seed, choice, position, torch.tensor(tokens))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-13, atol=1e-13)


def test_noise_never_changes_between_releases():
    """Every seeded answer ever given depends on these bits."""
    found = gumbel(7, 1, 100, torch.tensor([0, 1, 49_151]))
    assert [value.hex() for value in found.tolist()] == GOLDEN


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13, 31, 64, 1000])
def test_noise_does_not_depend_on_where_a_token_sits(start, length):
    """A library's SIMD loop and its scalar tail may differ in the last bit; ours may not."""
    everything = gumbel(3, 0, 5, torch.arange(2000))
    part = torch.arange(start, start + length)
    assert torch.equal(gumbel(3, 0, 5, part), everything[start : start + length])
    shuffled = torch.randperm(2000, generator=torch.Generator().manual_seed(start))
    assert torch.equal(gumbel(3, 0, 5, shuffled), everything[shuffled])
    assert torch.equal(gumbel(3, 0, 5, part.view(1, -1, 1)).flatten(), everything[part])


def test_noise_does_not_depend_on_the_rows_beside():
    tokens = np.arange(500)
    keys = row_keys([1, 2, 3], [0, 1, 2], [9, 8, 7])
    together = exponentials(keys[:, None], tokens[None, :])
    for key, row in zip(keys, together, strict=True):
        assert np.array_equal(exponentials(np.array([key]), tokens), row)
        for token in (0, 3, 499):
            assert exponentials(np.array([key]), np.array([token]))[0] == row[token]


@pytest.mark.parametrize("function", ["log", "exp"])
def test_elementary_functions_are_exact_to_two_units_in_the_last_place(function):
    rng = np.random.default_rng(0)
    if function == "log":
        x = np.concatenate(
            [
                rng.random(20_000),
                1 - rng.random(20_000) * 10.0 ** -rng.integers(1, 16, 20_000),
                np.exp(rng.uniform(-700, 700, 20_000)),
                [2.0**-53, 2.0**-60, 1 - 2.0**-53, math.sqrt(0.5), 1.0, 2.0],
            ]
        )
    else:
        x = np.concatenate([rng.uniform(-64, 0, 20_000), rng.uniform(-1e-9, 0, 1000), [0.0, -64.0]])
    expected = np.array([getattr(math, function)(value) for value in x])
    found = getattr(elementary, function)(x)
    assert np.all(np.abs(found - expected) <= 2 * np.spacing(np.abs(expected)))
    for start, stop in ((0, 1), (1, 4), (2, 19), (5, 1000)):
        assert np.array_equal(getattr(elementary, function)(x[start:stop]), found[start:stop])


def test_the_largest_noise_is_finite():
    bits = np.array([0, 2**64 - 1], dtype=np.uint64)
    extremes = noise._exponential(bits)
    assert extremes[0] == pytest.approx(53 * math.log(2))
    assert extremes[1] == pytest.approx(2.0**-53, rel=1e-12)


# ---- the hash


def test_one_flipped_bit_of_the_key_flips_every_bit_of_the_hash_half_the_time():
    """Near keys as they really occur: small numbers; N = 4096, so 0.5 +- 0.0078 a cell."""
    rng = np.random.default_rng(1)
    count = 4096
    seed, choice = rng.integers(0, 1000, count), rng.integers(0, 16, count)
    position, token = rng.integers(0, 4096, count), rng.integers(0, 49_152, count)

    def bits(seed, choice, position, token):
        hashed = noise._hash(row_keys(seed, choice, position), token, domain=0)
        return np.unpackbits(hashed.view(np.uint8).reshape(count, 8), axis=1)

    plain = bits(seed, choice, position, token)
    for word, width in ((0, 63), (1, 32), (2, 32), (3, 20)):
        for bit in range(width):
            key = [seed, choice, position, token]
            key[word] = key[word] ^ (1 << bit)
            flipped = (bits(*key) != plain).mean(axis=0)
            assert np.abs(flipped - 0.5).max() < 6 * 0.5 / math.sqrt(count), (word, bit)


def test_keys_of_all_near_requests_differ():
    near = list(itertools.product(range(16), range(16), range(256)))
    assert len(set(row_keys(*zip(*near, strict=True)).tolist())) == len(near)


def test_a_tokens_hash_differs_from_every_groups():
    key = row_keys([0], [0], [0])
    tokens = noise._hash(key, np.arange(50_000), domain=0)
    groups = noise._hash(key, np.arange(50_000), domain=1)
    assert len(set(tokens.tolist()) | set(groups.tolist())) == 100_000


# ---- the law

AXES = {
    "seeds": {"seeds": range(200_000), "tokens": [5]},
    "choices": {"choices": range(200_000), "tokens": [5]},
    "positions": {"positions": range(200_000), "tokens": [5]},
    "tokens": {"tokens": range(200_000)},
    "one token of each group": {"tokens": range(3, 200_000 * GROUP, GROUP)},
}


@functools.cache
def along(axis: str) -> np.ndarray:
    return uniforms(**AXES[axis]).ravel()


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_standard_gumbel_along_each_key(axis):
    u = along(axis)
    counts = np.histogram(u, bins=1000, range=(0, 1))[0]
    assert chi_square_p(counts, np.full(1000, len(u) / 1000)) > 1e-4
    # The far end decides who wins: -log E of the least values, against the law of the minimum.
    for share in (1e-2, 1e-3, 1e-4):
        above = np.count_nonzero(u > 1 - share)
        assert abs(above - share * len(u)) < 5 * math.sqrt(share * len(u))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 64, 127, 128])
def test_neighbours_along_each_key_are_independent(axis, lag):
    u = along(axis)
    a, b = u[:-lag], u[lag:]
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))
    # In disjoint pairs, so that the counts are of independent events.
    blocks = u[: len(u) // (2 * lag) * 2 * lag].reshape(-1, 2, lag)
    table = np.histogram2d(blocks[:, 0].ravel(), blocks[:, 1].ravel(), 16, [[0, 1]] * 2)[0]
    assert chi_square_p(table, np.full_like(table, table.sum() / 256)) > 1e-4


@pytest.mark.parametrize("axis", ["seeds", "choices", "positions"])
def test_whole_rows_of_near_keys_are_uncorrelated(axis):
    """All pairs of 64 consecutive keys, over 16,384 tokens, of the noise itself."""
    rows = -np.log(-np.log(uniforms(**{axis: range(64)}, tokens=range(16_384)))).reshape(64, -1)
    correlation = np.corrcoef(rows)[np.triu_indices(64, 1)]
    assert np.abs(correlation).max() < 5 / math.sqrt(16_384)
    # And together: 2016 squares of standard normals.
    total = float((correlation**2).sum() * 16_384)
    assert abs(total - 2016) < 5 * math.sqrt(2 * 2016)


def test_tokens_of_one_group_are_independent_over_positions():
    """The group's least value is drawn first; its tokens must not show it."""
    u = uniforms(positions=range(20_000), tokens=range(GROUP))[0, 0]
    correlation = np.corrcoef(u.T)[np.triu_indices(GROUP, 1)]
    assert np.abs(correlation).max() < 5 / math.sqrt(20_000)
    least = u.max(axis=1) ** GROUP  # the largest of 128 uniforms, made uniform
    counts = np.histogram(least, bins=100, range=(0, 1))[0]
    assert chi_square_p(counts, np.full(100, 200.0)) > 1e-4
    leaders = np.bincount(u.argmax(axis=1), minlength=GROUP)
    assert chi_square_p(leaders, np.full(GROUP, 20_000 / GROUP)) > 1e-4
    second = np.sort(u, axis=1)[:, -2:]
    # Ratio of the two largest of n uniforms to the n-1: again uniform, and free of the largest.
    ratio = (second[:, 0] / second[:, 1]) ** (GROUP - 1)
    table = np.histogram2d(ratio, least, 10, [[0, 1]] * 2)[0]
    assert chi_square_p(table, np.full_like(table, 200.0)) > 1e-4


def test_swapping_words_of_the_key_gives_other_noise():
    rows = [
        uniforms([a], [b], [c], range(64)).ravel() for a, b, c in itertools.permutations([1, 2, 3])
    ]
    for one, other in itertools.combinations(rows, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / 8
        assert not np.any(one == other)
