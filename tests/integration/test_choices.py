"""Several answers, logprobs and penalties over real engines, with drafting as without."""

from dataclasses import replace

import pytest

from flashduet.client import Client, Generation
from flashduet.sampling.params import Sampling
from tests.support.pair import Pair

PROMPT = list(range(4, 60))
HOT = Sampling(temperature=4.0, seed=11)
PENALIZED = Sampling(
    temperature=1.5,
    seed=3,
    presence_penalty=1.0,
    frequency_penalty=2.0,
    repetition_penalty=1.3,
    # Wanted so much that what the answer already has of them decides.
    logit_bias={9: 12.0, 200: 12.0},
)


def answer(pair: Pair, sampling: Sampling, **options) -> Generation:
    with Client(pair.gateway) as client:
        return client.generate(
            PROMPT, max_tokens=24, sampling=sampling, ignore_eos=True, **options
        ).result()


def assert_same_logprobs(run: Generation, expected: Generation) -> None:
    """The same tokens at each position, their logprobs as far as rounding keeps them."""
    for mine, theirs in zip(run.logprobs, expected.logprobs, strict=True):
        for one, other in zip((mine.chosen, *mine.top), (theirs.chosen, *theirs.top), strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_choices_and_logprobs_do_not_depend_on_drafting(pair: Pair):
    plain = answer(pair, HOT, n=3, top_logprobs=2, speculation="off")
    drafted = answer(pair, HOT, n=3, top_logprobs=2, speculation="fixed", block_length=8)
    assert drafted.speculation.accepted_tokens > 0
    assert len({tuple(choice.token_ids) for choice in plain.choices}) == 3
    for one, other in zip(plain.choices, drafted.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert [p.chosen.token_id for p in other.logprobs] == one.token_ids
        assert all(len(p.top) == 2 and p.top[0].logprob >= p.top[1].logprob for p in one.logprobs)
    assert_same_logprobs(drafted, plain)
    alone = answer(pair, HOT, speculation="fixed", block_length=8)
    assert alone.token_ids == plain.token_ids
    assert drafted.usage.completion_tokens == 3 * 24
    pair.assert_nothing_left()


def test_penalties_and_bias_do_not_depend_on_drafting(pair: Pair):
    plain = answer(pair, PENALIZED, speculation="off")
    assert 200 in plain.token_ids
    biased = replace(PENALIZED, presence_penalty=0.0, frequency_penalty=0.0)
    assert plain.token_ids != answer(pair, biased, speculation="off").token_ids
    for block in (2, 8):
        drafted = answer(pair, PENALIZED, speculation="fixed", block_length=block)
        assert drafted.token_ids == plain.token_ids, f"block length {block}"


def test_a_prompt_is_found_again_but_not_under_another_salt(pair: Pair):
    prompt = [7, *range(100, 200), 7, *range(30, 70)]

    def ask(salt: str, mode: str) -> Generation:
        with Client(pair.gateway) as client:
            return client.generate(
                prompt, max_tokens=16, ignore_eos=True, cache_salt=salt, speculation=mode
            ).result()

    first = ask("one", "fixed")
    again = [ask("one", "fixed"), ask("one", "off"), ask("one", "fixed")]
    assert first.usage.cached_tokens == 0
    for run in again:
        assert run.token_ids == first.token_ids
        assert 0 < run.usage.cached_tokens < len(prompt)
    assert again[2].speculation.drafted_rounds > 0
    stranger = ask("two", "fixed")
    assert (stranger.usage.cached_tokens, stranger.token_ids) == (0, first.token_ids)


def test_a_batch_request_that_is_cancelled_in_mid_answer_leaves_nothing(pair: Pair):
    with Client(pair.gateway) as client:
        stream = client.generate(
            PROMPT, max_tokens=150, n=4, ignore_eos=True, speculation="off", priority="batch"
        )
        next(iter(stream))
        stream.cancel()
        pair.assert_nothing_left()
