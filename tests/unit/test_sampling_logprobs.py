"""Logprobs are the raw softmax's, best first, equal ones by id, whatever else is in the step."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashduet.sampling import MAX_TOP_LOGPROBS, PositionLogprobs, TokenLogprob
from flashduet.sampling.logit_table import BadLogits
from flashduet.sampling.logprobs import row_logprobs
from flashduet.v1 import common_pb2


def plain(row: np.ndarray, token: int, top: int) -> PositionLogprobs:
    values = row.astype(np.float64)
    logprobs = values - values.max() - math.log(np.exp(values - values.max()).sum())
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    best = [i for i in order[:top] if row[i] > -np.inf]
    return PositionLogprobs(
        TokenLogprob(token, logprobs[token]), tuple(TokenLogprob(i, logprobs[i]) for i in best)
    )


def assert_same(got: PositionLogprobs, expected: PositionLogprobs) -> None:
    assert [t.token_id for t in got.top] == [t.token_id for t in expected.top]
    np.testing.assert_allclose(
        [t.logprob for t in (got.chosen, *got.top)],
        [t.logprob for t in (expected.chosen, *expected.top)],
        rtol=1e-5,
        atol=1e-6,
    )
    assert got.chosen.token_id == expected.chosen.token_id


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    width=st.sampled_from([1, 5, 127, 128, 129, 300, 3000]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 1e4]),
    step=st.sampled_from([0.0, 0.5, 4.0]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    top=st.lists(st.integers(0, MAX_TOP_LOGPROBS), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_logprobs_are_what_the_plain_rule_says(width, spread, step, banned, top, dtype, seed):
    rng = np.random.default_rng(seed)
    count = len(top)
    rows = rng.normal(size=(count + 2, width)) * spread
    if step:
        rows = np.round(rows / step) * step
    rows[rng.random(rows.shape) < banned] = -np.inf
    rows[np.arange(count + 2), rng.integers(width, size=count + 2)] = 3.0
    logits = torch.from_numpy(rows.astype(np.float32)).to(dtype)
    asked = rng.permutation(count + 2)[:count].tolist()
    tokens = rng.integers(width, size=count).tolist()
    got = row_logprobs(logits, asked, tokens, top)
    for entry, row, token, wanted in zip(got, asked, tokens, top, strict=True):
        assert_same(entry, plain(logits[row].float().numpy(), token, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_step_it_is_in(dtype):
    logits = (torch.randn(9, 49_152, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    tokens = [100 * i for i in range(9)]
    together = row_logprobs(logits, list(range(9)), tokens, [20] * 9)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            alone = [row_logprobs(logits, [i], [tokens[i]], [20])[0] for i in range(9)]
            assert alone == together
    finally:
        torch.set_num_threads(threads)


def test_they_need_not_be_asked_for():
    assert row_logprobs(torch.zeros(3, 5), [], [], []) == []
    [entry] = row_logprobs(torch.zeros(3, 4), [1], [2], [0])
    assert entry == PositionLogprobs(TokenLogprob(2, entry.chosen.logprob))
    assert entry.chosen.logprob == pytest.approx(-math.log(4))


def test_the_wire_keeps_them():
    entry = PositionLogprobs(
        TokenLogprob(7, -0.25), (TokenLogprob(3, -0.125), TokenLogprob(7, -0.25))
    )
    wire = common_pb2.PositionLogprobs.FromString(entry.to_proto().SerializeToString())
    assert PositionLogprobs.from_proto(wire) == entry


def test_what_cannot_be_asked_is_refused():
    logits = torch.zeros(2, 30)
    for top in (-1, MAX_TOP_LOGPROBS + 1):
        with pytest.raises(ValueError, match="top logprobs are 0 to 20"):
            row_logprobs(logits, [0], [0], [top])
    with pytest.raises(ValueError, match="1 rows, 2 tokens, 1 numbers of top"):
        row_logprobs(logits, [0], [0, 1], [1])
    logits[1, 3] = torch.nan
    row_logprobs(logits, [0], [0], [1])
    with pytest.raises(BadLogits):
        row_logprobs(logits, [0, 1], [0, 0], [1, 1])


def test_their_types_need_no_torch():
    code = (
        "import sys, flashduet.sampling, flashduet.sampling.history; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
