"""Choosing agrees with the plain rule, and a row's token depends on nothing but the row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashduet.sampling import choose, nucleus
from flashduet.sampling.choose import (
    BadLogits,
    RowKey,
    choose_draft_rows,
    choose_drafts,
    choose_rows,
    choose_tokens,
)
from flashduet.sampling.noise import GROUP
from flashduet.sampling.params import Sampling
from tests.unit import sampling_reference as reference

pytestmark = pytest.mark.usefixtures("way_to_choose")

SETTINGS = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

temperatures = st.one_of(
    st.sampled_from([0.0, 0.8, 1.0, 100.0, 1e-3, 1e-12, 1e-300, 5e-324]), st.floats(0.05, 5.0)
)
samplings = st.builds(
    Sampling,
    temperature=temperatures,
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.25, 0.5, 0.75]), st.floats(0.01, 1.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 700)),
    min_p=st.one_of(st.just(0.0), st.sampled_from([1.0, 0.5]), st.floats(0.0, 1.0)),
    seed=st.integers(0, 2**64 - 1),
)


@st.composite
def logit_rows(draw: st.DrawFn) -> np.ndarray:
    """One row: smooth or full of ties, with some -inf, of a width around the group borders."""
    width = draw(st.sampled_from([1, 2, 7, 127, 128, 129, 256, 300, 600]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.normal(size=width) * draw(st.sampled_from([0.0, 0.1, 1.0, 8.0, 1e4, 1e37]))
    step = draw(st.sampled_from([0.0, 0.5, 4.0]))
    if step:
        row = np.round(row / step) * step
    row[rng.random(width) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = -np.inf
    row[rng.integers(width)] = draw(st.sampled_from([0.0, 3.0, 50.0]))
    return row.astype(np.float32)


@SETTINGS
@given(
    row=logit_rows(), sampling=samplings, position=st.integers(0, 2**31), choice=st.integers(0, 9)
)
def test_a_token_is_what_the_plain_rule_says(row, sampling, position, choice):
    chosen = choose_tokens(torch.from_numpy(row)[None], position, sampling, choice)
    assert chosen.tokens == [reference.choose(row, position, sampling, choice)]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_p": 0.95},
        {"top_p": 0.2},
        {"top_k": 50},
        {"top_k": 2000, "top_p": 0.9},
        {"min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_a_whole_vocabulary_agrees_with_the_plain_rule(temperature, filters, spread):
    logits = torch.randn(1, 49_152, generator=torch.Generator().manual_seed(5)) * spread
    sampling = Sampling(temperature=temperature, seed=11, **filters)
    expected = reference.choose(logits[0].numpy(), 77, sampling, 2)
    assert choose_tokens(logits, 77, sampling, 2).tokens == [expected]


# ---- filters and their borders


def chosen_over_positions(
    row: list[float] | torch.Tensor, sampling: Sampling, count=400
) -> set[int]:
    logits = torch.as_tensor(row, dtype=torch.float32).expand(count, -1)
    return set(choose_tokens(logits, 0, sampling).tokens)


def test_equal_logits_at_the_border_of_top_k_go_to_the_lowest_ids():
    row = [0.0] * 300
    row[200] = 1.0
    sampling = Sampling(temperature=5.0, top_k=4)
    assert chosen_over_positions(row, sampling) == {0, 1, 2, 200}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.25, 64), (0.5, 128), (0.2501, 65), (1 / 256, 1), (math.nextafter(0.25, 1), 65)],
)
def test_equal_logits_at_the_border_of_top_p_go_to_the_lowest_ids(top_p, kept):
    """The mass before token 64 of 256 equal ones is exactly 0.25: it is out at 0.25."""
    chosen = chosen_over_positions([1.5] * 256, Sampling(temperature=1.0, top_p=top_p), 2000)
    assert chosen == set(range(kept))


def test_filters_apply_in_order():
    """Top-p counts mass after temperature and top-k; min-p compares with the best token's."""
    row = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    warm = {"temperature": 1.0}
    assert chosen_over_positions(row, Sampling(**warm, top_p=0.65)) == {0, 1}
    assert chosen_over_positions(row, Sampling(**warm, top_k=2, top_p=0.5)) == {0}
    assert chosen_over_positions(row, Sampling(**warm, min_p=0.45)) == {0, 1, 2}
    assert chosen_over_positions(row, Sampling(temperature=0.25, min_p=0.45)) == {0}


def test_top_p_one_and_top_k_over_the_vocabulary_keep_all():
    row = [0.0, -1.0, -2.0, -3.0]
    for filters in ({}, {"top_p": 1.0}, {"top_k": 4}, {"top_k": 2**32 - 1}, {"min_p": 0.0}):
        assert chosen_over_positions(row, Sampling(temperature=2.0, **filters)) == {0, 1, 2, 3}


def test_a_banned_token_is_never_chosen():
    row = torch.zeros(300)
    row[::2] = -torch.inf
    assert all(token % 2 for token in chosen_over_positions(row, Sampling(temperature=100.0)))


def test_the_smallest_temperature_is_greedy():
    logits = torch.randn(20, 700, generator=torch.Generator().manual_seed(0))
    cold = choose_tokens(logits, 0, Sampling(temperature=5e-324, seed=1)).tokens
    assert cold == logits.argmax(-1).tolist()


@pytest.mark.parametrize("width", [1, 5, 128, 129, 5000, 49_152])
def test_greedy_is_the_lowest_id_of_the_largest_logit_as_torch_argmax(width):
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.integers(-3, 3, (17, width)).astype(np.float32))
    expected = [int(np.flatnonzero(row == row.max())[0]) for row in logits.numpy()]
    assert choose_tokens(logits, 0, Sampling()).tokens == expected
    assert choose_tokens(logits, 0, Sampling(top_p=0.1, top_k=3, min_p=0.5)).tokens == expected
    assert logits.argmax(-1).tolist() == expected  # what Transformers' greedy generate does


# ---- a row's token depends on nothing but the row


def mixed_rows(count: int) -> list[RowKey]:
    kinds = [
        Sampling(),
        Sampling(temperature=0.8, top_p=0.95, seed=7),
        Sampling(temperature=1.3, top_k=20, seed=8),
        Sampling(temperature=1.0, top_k=300, top_p=0.5, min_p=0.001, seed=9),
        Sampling(temperature=2.0, top_p=0.05, seed=2**64 - 1),
    ]
    return [RowKey(1000 + i // 3, kinds[i % len(kinds)], i % 4) for i in range(count)]


@pytest.mark.parametrize("width", [300, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_batch_size_row_order_and_threads_change_nothing(width, dtype):
    rows = mixed_rows(30)
    logits = (torch.randn(30, width, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    together = choose_rows(logits, rows).tokens
    alone = [choose_rows(logits[i : i + 1], rows[i : i + 1]).tokens[0] for i in range(30)]
    assert alone == together
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2)).tolist()
    assert choose_rows(logits[order], [rows[i] for i in order]).tokens == [
        together[i] for i in order
    ]
    drafts = choose_draft_rows(logits.t().contiguous().t(), rows)
    assert drafts.tokens == together
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert choose_rows(logits, rows).tokens == together
    finally:
        torch.set_num_threads(threads)


def test_a_wrapper_is_the_same_as_rows():
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.9, seed=3)
    keys = [RowKey(40 + i, sampling, 2) for i in range(6)]
    assert choose_tokens(logits, 40, sampling, 2) == choose_rows(logits, keys)
    assert choose_drafts(logits, 40, sampling, 2) == choose_draft_rows(logits, keys)


@SETTINGS
@given(row=logit_rows(), sampling=samplings, drop=st.integers(0, 2**32))
def test_dropping_a_loser_changes_no_winner(row, sampling, drop):
    """The noise of a token does not depend on which candidates it runs against."""
    if sampling.top_p < 1 or sampling.temperature == 0:
        sampling = Sampling(temperature=1.0, top_k=sampling.top_k, seed=sampling.seed)
    [winner] = choose_tokens(torch.from_numpy(row)[None], 9, sampling).tokens
    loser = drop % len(row)
    kept = reference.kept_tokens(row, sampling)
    if loser == winner or loser in kept[:1] or (sampling.top_k and loser in kept):
        return
    row = row.copy()
    row[loser] = -np.inf
    assert choose_tokens(torch.from_numpy(row)[None], 9, sampling).tokens == [winner]


def test_padding_the_vocabulary_with_banned_tokens_changes_nothing():
    rows = mixed_rows(20)
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(4))
    padded = torch.full((20, 1024), -torch.inf)
    padded[:, :300] = logits
    assert choose_rows(padded, rows) == choose_rows(logits, rows)


@pytest.mark.parametrize("tier", ["whole row", "exact"])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_every_way_to_decide_top_p_gives_the_same_answer(monkeypatch, tier, spread):
    logits = torch.randn(60, 5000, generator=torch.Generator().manual_seed(6)) * spread
    rows = [
        RowKey(i, Sampling(temperature=1.0, top_p=(0.1, 0.5, 0.9, 0.99)[i % 4], seed=i))
        for i in range(60)
    ]
    expected = choose_rows(logits, rows)
    decided: list[object] = []
    exactly = nucleus.Nucleus._holds_exactly
    monkeypatch.setattr(choose, "native_choice", lambda: None)
    # What the picked groups would have decided is asked of the whole row.
    monkeypatch.setattr(nucleus.Nucleus, "holds", nucleus.Nucleus._hold_by_rows)
    if tier == "exact":
        monkeypatch.setattr(nucleus, "_ROW_MARGIN", np.inf)
        monkeypatch.setattr(
            nucleus.Nucleus,
            "_holds_exactly",
            lambda *given: decided.append(given) or exactly(*given),
        )
    assert choose_rows(logits, rows) == expected
    assert bool(decided) == (tier == "exact")


# ---- confidence


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=1.5, top_p=0.9, top_k=100),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=1.0, min_p=0.05, top_p=0.7, top_k=200),
        Sampling(temperature=1e-9),
        Sampling(temperature=5.0, top_p=0.99),
    ],
    ids=str,
)
def test_confidence_is_the_filtered_probability_before_noise(sampling):
    logits = torch.randn(12, 900, generator=torch.Generator().manual_seed(7)) * 2
    drafts = choose_drafts(logits, 50, sampling)
    assert drafts.tokens == choose_tokens(logits, 50, sampling).tokens
    plain = Sampling(temperature=1.0) if sampling.greedy else sampling
    expected = [
        reference.probabilities(row, plain)[token]
        for row, token in zip(logits.numpy(), drafts.tokens, strict=True)
    ]
    np.testing.assert_allclose(drafts.confidence, expected, rtol=1e-4)


# ---- bad input


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 127, 128, 299])
def test_nan_and_infinity_are_an_error_that_names_the_rows(sampling, bad, place):
    logits = torch.zeros(4, 300)
    logits[1, place] = bad
    logits[3] = -torch.inf
    with pytest.raises(BadLogits, match="row\\(s\\) 1, 3 hold") as caught:
        choose_tokens(logits, 0, sampling)
    assert caught.value.rows == (1, 3)
    # The other sessions of the step can go on.
    assert len(choose_tokens(logits[[0, 2]], 0, sampling).tokens) == 2


def test_nan_beside_infinity_is_an_error():
    logits = torch.zeros(1, 300)
    logits[0, 10], logits[0, 11], logits[0, 250] = float("inf"), float("nan"), -float("inf")
    with pytest.raises(BadLogits):
        choose_tokens(logits, 0, Sampling())


def test_no_rows_give_no_tokens():
    assert choose_rows(torch.zeros(0, 300), []).tokens == []
    assert choose_draft_rows(torch.zeros(0, 300), []).confidence == []


@pytest.mark.parametrize(
    "logits", [torch.zeros(5), torch.zeros(1, 0), torch.zeros(1, 5, dtype=torch.int64)], ids=str
)
def test_a_tensor_of_another_kind_is_a_programming_error(logits):
    with pytest.raises(ValueError, match="logits must be a float tensor"):
        choose_tokens(logits, 0, Sampling())


def test_one_key_a_row():
    with pytest.raises(ValueError, match="2 rows of logits, 1 keys"):
        choose_rows(torch.zeros(2, 5), [RowKey(0, Sampling())])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [GROUP * 6, GROUP * 6 + 5])
def test_logits_in_16_bits_give_what_the_same_numbers_give_in_32(dtype, vocabulary):
    logits = (torch.randn(12, vocabulary, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)
    before = logits.clone()
    for sampling in (
        Sampling(),
        Sampling(temperature=0.8, top_p=0.95, seed=3),
        Sampling(temperature=1.3, top_k=9, min_p=0.02, seed=4),
        Sampling(temperature=0.9, seed=5, logit_bias={7: 3.0}),
    ):
        chosen = choose_drafts(logits, 40, sampling)
        expected = choose_drafts(logits.float(), 40, sampling)
        assert chosen.tokens == expected.tokens
        np.testing.assert_allclose(chosen.confidence, expected.confidence, rtol=1e-5)
    assert torch.equal(logits, before)
