"""The noise of a position: standard Gumbel variates from a hash of (seed, choice, position, token).

Nothing is drawn in sequence: every variate is a pure function of its key, with the same bits in any
batch, on any machine and after any restart.

The hash absorbs the key's words one by one with the 64-bit finalizer "variant 13" of David Stafford
("Better Bit Mixing", 2011), which SplitMix64 uses too (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, OOPSLA 2014), then runs two keyed rounds of it over a counter.

A Gumbel variate is -log(E), E standard exponential, so argmax(logit + g) is the winner of an
exponential race. Token ids are grouped by 128 and the E of a group are drawn top down: their
minimum m is exponential with rate 128, its holder (the leader) is uniform in the group, and by lack
of memory the others are m plus independent standard exponentials. That is exactly the joint law of
independent E, and it bounds a whole group's noise after one hash, so that the choice can skip the
groups that can't win (Maddison, Tarlow, Minka: A* Sampling, 2014, has the top-down idea).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flashduet.sampling.elementary import FloatArray, log

GROUP = 128

Keys = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

# Odd integer nearest 2^64 / golden ratio: spreads counters over all bits before mixing.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
# Start of the absorption: our own domain ("fd noise" in ASCII), so other users of the mixer differ.
_DOMAIN = np.uint64(0x6664206E6F697365)


def row_keys(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> Keys:
    """One 64-bit key per row from (seed, choice, position), each in 0 .. 2^64 - 1.

    For a fixed seed and choice it is a bijection of the position: two never share a key.
    """
    state = np.full(len(seeds), _DOMAIN, dtype=np.uint64)
    for words in (seeds, choices, positions):
        state = _mix(_mix(state ^ np.array(words, dtype=np.uint64)) + _GAMMA)
    return state


def group_noise(keys: Keys, groups: Ids) -> tuple[FloatArray, Ids]:
    """Least exponential of each group and the token id that holds it; arguments broadcast.

    The top 52 bits of the hash make the exponential, the low 7 pick the leader: they share none.
    """
    bits = _hash(keys, groups, domain=1)
    minima = _exponential(bits) * (1.0 / GROUP)
    return minima, groups * GROUP + (bits & np.uint64(GROUP - 1)).astype(np.int64)


def nearly_group_noise(keys: Keys, groups: Ids) -> tuple[FloatArray, Ids]:
    """Largest Gumbel variate of each group, off by less than 1e-11, and the id that holds it.

    By the library's log, which is several times faster: good for bounds, never for a score.
    """
    bits = _hash(keys, groups, domain=1)
    noise = -np.log(np.log(_uniform(bits)) * (-1.0 / GROUP))
    return noise, groups * GROUP + (bits & np.uint64(GROUP - 1)).astype(np.int64)


def exponentials(keys: Keys, token_ids: Ids) -> FloatArray:
    """Standard exponential of each token; `keys` and `token_ids` broadcast. Always above 0."""
    groups = token_ids // GROUP
    bits = _hash(keys, groups, domain=1)
    leaders = groups * GROUP + (bits & np.uint64(GROUP - 1)).astype(np.int64)
    # In one array, since on short ones a logarithm's cost is that of its many calls.
    minima, rest = _exponential(np.stack([bits, _hash(keys, token_ids, domain=0)]))
    minima *= 1.0 / GROUP
    return np.where(leaders == token_ids, minima, minima + rest)


def nearly_gumbels(keys: Keys, token_ids: Ids) -> FloatArray:
    """Standard Gumbel variate of each token, off by less than 1e-11: for bounds, as above."""
    noise, leaders = nearly_group_noise(keys, token_ids // GROUP)
    rest = -np.log(_uniform(_hash(keys, token_ids, domain=0)))
    return np.where(leaders == token_ids, noise, -np.log(np.exp(-noise) + rest))


def gumbels(keys: Keys, token_ids: Ids) -> FloatArray:
    """Standard Gumbel variate of each token; `keys` and `token_ids` broadcast."""
    return -log(exponentials(keys, token_ids))


def gumbel(seed: int, choice: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise of `token_ids` (int64, any shape) at a position: float64, same shape, on the CPU.

    `position` is that of the token being chosen. A value depends on its own id only, never on
    where it stands in `token_ids` or on what else does.
    """
    ids = token_ids.detach().cpu().to(torch.int64).contiguous().numpy()
    return torch.from_numpy(gumbels(row_keys([seed], [choice], [position])[0:1], ids.ravel())).view(
        token_ids.shape
    )


def _mix(z: Keys) -> Keys:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hash(keys: Keys, counters: Ids, domain: int) -> Keys:
    """64 bits for each (key, counter, domain bit); a bijection of the counter for a fixed key."""
    counter = (counters.astype(np.uint64) << np.uint64(1)) | np.uint64(domain)
    return _mix(_mix(counter * _GAMMA + keys) ^ keys)


def _exponential(bits: Keys) -> FloatArray:
    return -log(_uniform(bits))


def _uniform(bits: Keys) -> FloatArray:
    """(2 k + 1) / 2^53 with k the top 52 bits: never 0 or 1, and never rounded."""
    return ((bits >> np.uint64(11)) | np.uint64(1)).astype(np.float64) * 2.0**-53
