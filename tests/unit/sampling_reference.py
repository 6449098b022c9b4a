"""The rule of docs/sampling.md, slow and plain: Python integers, math, a full sort. No shortcut."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from flashduet.sampling.params import Sampling

WORD = 2**64 - 1
GROUP = 128


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def row_key(seed: int, choice: int, position: int) -> int:
    state = int.from_bytes(b"fd noise", "big")
    for word in (seed, choice, position):
        state = mix((mix(state ^ word) + 0x9E3779B97F4A7C15) & WORD)
    return state


def hashed(key: int, counter: int) -> int:
    return mix(mix((counter * 0x9E3779B97F4A7C15 + key) & WORD) ^ key)


def exponential(bits: int) -> float:
    return -math.log((2 * (bits >> 12) + 1) / 2**53)


def gumbel(seed: int, choice: int, position: int, token: int) -> float:
    key = row_key(seed, choice, position)
    group = token // GROUP
    bits = hashed(key, 2 * group + 1)
    e = exponential(bits) / GROUP
    if group * GROUP + bits % GROUP != token:
        e += exponential(hashed(key, 2 * token))
    return -math.log(e)


def kept_tokens(logits: np.ndarray, sampling: Sampling) -> list[int]:
    """Ids that the filters keep, most likely first, by a full sort and exact sums."""
    values = [float(value) for value in logits.astype(np.float32)]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    largest = values[order[0]]
    distance = {i: (values[i] - largest) / sampling.temperature for i in order}
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        mass = [round(math.exp(max(distance[i], -64)) * 2**40) for i in order]
        limit = Fraction(sampling.top_p) * sum(mass)
        before, kept = 0, []
        for token, own in zip(order, mass, strict=True):
            if before >= limit:
                break
            kept.append(token)
            before += own
        order = kept
    if sampling.min_p > 0:
        order = [i for i in order if distance[i] >= math.log(sampling.min_p)]
    return order


def penalized(
    logits: np.ndarray, sampling: Sampling, tokens: list[int], prompt_length: int
) -> np.ndarray:
    """One row after `tokens`, of which the first prompt_length are the prompt's, id by id."""
    changed = logits.astype(np.float32).copy()
    answer = tokens[prompt_length:]
    for token in range(len(changed)):
        value = changed[token]
        if token in sampling.logit_bias:
            value = value + np.float32(sampling.logit_bias[token])
        if token in tokens:
            repetition = np.float32(sampling.repetition_penalty)
            value = value / repetition if value > 0 else value * repetition
        if token in answer:
            times = np.float32(answer.count(token))
            value = value - np.float32(sampling.frequency_penalty) * times
            value = value - np.float32(sampling.presence_penalty)
        changed[token] = value
    return changed


def choose(logits: np.ndarray, position: int, sampling: Sampling, choice: int = 0) -> int:
    """The token of one row."""
    values = logits.astype(np.float32).astype(np.float64)
    if sampling.temperature == 0:
        return int(np.flatnonzero(values == values.max())[0])
    best, winner = -math.inf, -1
    for token in sorted(kept_tokens(logits, sampling)):
        score = (values[token] - values.max()) / sampling.temperature
        score += gumbel(sampling.seed, choice, position, token)
        if score > best:
            best, winner = score, token
    return winner


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The filtered softmax of one row, float64 [V]."""
    values = logits.astype(np.float64)
    result = np.zeros(len(values))
    if sampling.temperature == 0:
        result[choose(logits, 0, sampling)] = 1
        return result
    kept = kept_tokens(logits, sampling)
    result[kept] = np.exp((values[kept] - values.max()) / sampling.temperature)
    return result / result.sum()


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of Pearson's test; cells with an expectation under 5 are pooled into one."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(expected).astype(float)
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    impossible = expected == 0
    if counts[impossible].any():
        return 0.0
    counts, expected = counts[~impossible], expected[~impossible]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half_freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2).double()))
