"""Penalties and bias agree with the plain rule, and a block with one token at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from flashduet.sampling.choose import (
    BadLogits,
    RowBlock,
    RowKey,
    choose_blocks,
    choose_draft_blocks,
    choose_rows,
    choose_tokens,
)
from flashduet.sampling.history import TokenHistory
from flashduet.sampling.logit_table import LogitTable
from flashduet.sampling.params import Sampling
from tests.unit import sampling_reference as reference

pytestmark = pytest.mark.usefixtures("way_to_choose")

SETTINGS = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
VOCABULARY = 300

# Few ids, so that tokens come back.
tokens = st.lists(st.one_of(st.integers(0, 12), st.integers(0, VOCABULARY - 1)), max_size=30)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
    top_p=st.sampled_from([1.0, 0.6]),
    top_k=st.sampled_from([0, 40]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 10.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY + 9), st.floats(-9, 9), max_size=5),
)


def some_logits(rows: int, seed: int, favoured: int = 13) -> torch.Tensor:
    """[rows, VOCABULARY], with ties and with the low ids ahead, so that they repeat."""
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    logits[:, :favoured] += 3
    return (logits * 4).round() / 4


@SETTINGS
@given(
    prompt=tokens.filter(len),
    answer=tokens,
    drafts=tokens.map(lambda ids: ids[:7]),
    sampling=samplings,
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_row_of_a_block_is_penalized_as_the_plain_rule_says(
    prompt, answer, drafts, sampling, seed, dtype
):
    logits = some_logits(len(drafts) + 1, seed).to(dtype)
    before = prompt + answer
    block = RowBlock(
        len(before), len(logits), sampling, 1, TokenHistory(len(prompt), before), drafts=drafts
    )
    rows = [
        reference.penalized(row, sampling, before + drafts[:i], len(prompt))
        for i, row in enumerate(logits.float().numpy())
    ]
    table = LogitTable(logits, [block])
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(table.row(i), row)
    assert choose_blocks(logits, [block]) == [
        [reference.choose(row, len(before) + i, sampling, 1) for i, row in enumerate(rows)]
    ]


def decoded(
    sampling: Sampling, prompt: list[int], count: int, draft_seed: int | None = None
) -> list[int]:
    """`count` tokens after a prompt by a model that looks at the last token and the position.

    With a draft_seed, in blocks of up to 5 drafts, of which about two thirds are right.
    """
    model = some_logits(VOCABULARY, 3)
    history = TokenHistory(len(prompt), prompt)
    truth = None if draft_seed is None else decoded(sampling, prompt, count + 8)
    rng = np.random.default_rng(draft_seed or 0)
    answer: list[int] = []
    while len(answer) < count:
        position, drafts = len(prompt) + len(answer), []
        if truth is not None:
            drafts = truth[len(answer) : len(answer) + int(rng.integers(0, 6))]
            drafts = [d if rng.random() < 0.67 else int(rng.integers(0, 13)) for d in drafts]
        sequence = [*prompt, *answer, *drafts]
        logits = torch.stack(
            [
                model[sequence[i - 1]].roll(i % 3)
                for i in range(position, position + len(drafts) + 1)
            ]
        )
        [chosen] = choose_blocks(
            logits, [RowBlock(position, len(logits), sampling, 0, history, drafts=drafts)]
        )
        accepted = 0
        while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
            accepted += 1
        history.extend(chosen[: accepted + 1])
        answer += chosen[: accepted + 1]
    return answer[:count]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.4},
        {"presence_penalty": -0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_drafting_changes_no_penalized_token(temperature, penalties):
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=4, **penalties)
    plain = decoded(sampling, [5, 6, 7, 8], 60)
    assert plain != decoded(replace(sampling, **dict.fromkeys(penalties, 0.25)), [5, 6, 7, 8], 60)
    for draft_seed in range(4):
        assert decoded(sampling, [5, 6, 7, 8], 60, draft_seed) == plain


def test_a_session_that_moved_goes_on_as_it_was():
    """All committed tokens and the prompt's length rebuild the history."""
    sampling = Sampling(temperature=0.9, frequency_penalty=0.8, repetition_penalty=1.2, seed=4)
    logits = some_logits(1, 8)
    grown = TokenHistory(3, [1, 2, 3])
    for token in (5, 1, 5, 9):
        grown.extend([token])
    moved = TokenHistory(3, [1, 2, 3, 5, 1, 5, 9])
    as_prompt = TokenHistory(7, [1, 2, 3, 5, 1, 5, 9])
    tables = [
        LogitTable(logits, [RowBlock(7, 1, sampling, 0, history)]).row(0)
        for history in (grown, moved, as_prompt)
    ]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert (tables[0] != tables[2]).any()


@SETTINGS
@given(
    committed=tokens.filter(len),
    anchor=st.integers(0, 12),
    sampling=samplings,
    rows=st.integers(1, 9),
)
def test_drafts_are_chosen_as_one_after_the_other(committed, anchor, sampling, rows):
    logits = some_logits(rows, len(committed))
    # Rows much alike, so that without a look at the block the same token would come again.
    logits = (logits + 9 * logits[:1]) / 10
    history = TokenHistory(len(committed) // 2, committed)
    first = len(committed) + 1
    block = RowBlock(first, rows, sampling, 2, history, pending=(anchor,))
    other = RowBlock(5, 2, Sampling(temperature=1.0, seed=1))
    more = some_logits(2, 77)
    drafted = choose_draft_blocks(torch.cat([more, logits, more]), [other, block, other])
    one_by_one: list[int] = []
    for i in range(rows):
        row = reference.penalized(
            logits[i].numpy(), sampling, [*committed, anchor, *one_by_one], len(committed) // 2
        )
        one_by_one.append(reference.choose(row, first + i, sampling, 2))
    assert drafted[1].tokens == one_by_one
    assert drafted[0] == drafted[2] == choose_draft_blocks(more, [other])[0]
    assert len(drafted[1].confidence) == rows


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_that_of_transformers(penalty):
    logits = some_logits(1, 5)
    seen = [3, 3, 200, 17, 299]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits.clone())
    block = RowBlock(5, 1, Sampling(repetition_penalty=penalty), 0, TokenHistory(2, seen))
    np.testing.assert_array_equal(LogitTable(logits, [block]).row(0), expected[0].numpy())


@pytest.mark.parametrize("width", [256, VOCABULARY])
def test_other_rows_of_a_step_are_left_alone(width):
    penalized = Sampling(temperature=0.8, presence_penalty=2.0, logit_bias={1: 50.0}, seed=3)
    plain = Sampling(temperature=0.8, top_p=0.9, seed=3)
    logits = some_logits(6, 1)[:, :width].contiguous()
    kept = logits.clone()
    blocks = [
        RowBlock(10, 2, plain),
        RowBlock(4, 2, penalized, 0, TokenHistory(1, [9, 8, 7, 6]), drafts=[5]),
        RowBlock(20, 2, plain),
    ]
    together = choose_blocks(logits, blocks)
    assert torch.equal(logits, kept), "the caller's logits were written to"
    assert together[0] == choose_tokens(logits[:2], 10, plain).tokens
    assert together[1] == choose_blocks(logits[2:4], blocks[1:2])[0]
    assert together[2] == choose_tokens(logits[4:], 20, plain).tokens


def test_a_bias_needs_no_history():
    banned = Sampling(logit_bias={2: -100.0})
    logits = torch.tensor([[0.0, 1.0, 9.0, 3.0]])
    assert choose_rows(logits, [RowKey(7, banned)]).tokens == [3]
    assert choose_tokens(logits, 7, Sampling(logit_bias={0: 100.0, 4000: 100.0})).tokens == [0]


def test_tokens_outside_the_vocabulary_touch_no_other_row():
    sampling = Sampling(repetition_penalty=2.0, logit_bias={305: 100.0, 2**32 - 1: 9.0})
    logits = some_logits(2, 4)
    blocks = [
        RowBlock(3, 1, sampling, 0, TokenHistory(3, [301, 383, 400])),
        RowBlock(1, 1, Sampling()),
    ]
    table = LogitTable(logits, blocks)
    np.testing.assert_array_equal(table.row(0), logits[0].numpy())
    np.testing.assert_array_equal(table.row(1), logits[1].numpy())


def test_the_smallest_repetition_penalty_makes_no_infinity():
    sampling = Sampling(repetition_penalty=5e-324)
    logits = torch.tensor([[-torch.inf, 20.0, 0.0, -3.0]])
    block = RowBlock(4, 1, sampling, 0, TokenHistory(4, [0, 1, 2, 3]))
    assert choose_blocks(logits, [block]) == [[1]]


def test_bad_logits_of_a_penalized_block_are_named_by_their_rows():
    sampling = Sampling(temperature=1.0, presence_penalty=1.0)
    logits = some_logits(5, 4)
    logits[3, 7] = torch.nan
    blocks = [
        RowBlock(9, 2, Sampling()),
        RowBlock(1, 3, sampling, 0, TokenHistory(1, [7])),
    ]
    for choose in (choose_blocks, choose_draft_blocks):
        with pytest.raises(BadLogits) as caught:
            choose(logits, blocks)
        assert caught.value.rows == (3,)


def test_bad_logits_that_only_a_draft_before_brings_are_named_too():
    sampling = Sampling(repetition_penalty=10.0)
    blocks = [RowBlock(9, 2, Sampling()), RowBlock(0, 2, sampling, 0, TokenHistory(0))]
    with pytest.raises(BadLogits) as caught:
        choose_draft_blocks(torch.full((4, 1), -3e38), blocks)
    assert caught.value.rows == (3,)


def test_a_missing_or_short_history_is_a_programming_error():
    sampling = Sampling(presence_penalty=1.0)
    with pytest.raises(ValueError, match="need a token history"):
        choose_tokens(torch.zeros(1, 5), 0, sampling)
    with pytest.raises(ValueError, match="2 tokens are known before position 3"):
        RowBlock(3, 1, sampling, 0, TokenHistory(1, [1]), pending=(4,))


@given(
    ids=st.lists(st.integers(0, 5), max_size=200),
    prompt_length=st.integers(0, 50),
    cuts=st.lists(st.integers(0, 200), max_size=4),
)
@settings(max_examples=50)
def test_a_history_counts_whatever_was_added_and_taken_back(ids, prompt_length, cuts):
    ids = [token * 1000 for token in ids] + list(range(100))
    history, known = TokenHistory(prompt_length), []
    for cut in cuts:
        history.extend(ids)
        known += ids
        known = known[: min(cut, len(known))]
        history.truncate(len(known))
    history.extend(ids)
    known += ids
    assert len(history) == len(known)
    for token in set(known):
        slot = history.slot(token)
        assert slot is not None
        assert history.token_ids[slot] == token
        assert history.total_counts[slot] == known.count(token)
        assert history.answer_counts[slot] == known[prompt_length:].count(token)
    assert history.total_counts.sum() == len(known)
    with pytest.raises(ValueError, match="length 9999 of a history"):
        history.truncate(9999)
