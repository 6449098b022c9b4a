"""The tokens are the target's own, whatever the drafter, the block length or the sampling."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from flashduet.client import Client
from flashduet.sampling.params import Sampling
from tests.support.pair import Pair
from tests.support.tiny import IM_END, MASK

PROMPTS = [
    [5, 9, 77, 140, 33],
    list(range(4, 120)),
    [200] * 40,
]
# Under strong noise both sides follow the shared noise, so that blocks are accepted in part.
SAMPLINGS = {
    "greedy": Sampling(),
    "nucleus": Sampling(temperature=0.8, top_p=0.95, seed=7),
    "hot": Sampling(temperature=4.0, seed=11),
    "filtered": Sampling(temperature=2.5, top_k=100, min_p=0.01, seed=12),
}
BLOCKS = [2, 3, 4, 8, 16]


def answer(pair: Pair, prompt: list[int], sampling: Sampling, **options):
    with Client(pair.gateway) as client:
        return client.generate(
            prompt, max_tokens=40, sampling=sampling, ignore_eos=True, **options
        ).result()


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "several-chunks", "repeated"])
def test_output_does_not_depend_on_drafting(pair, name, prompt):
    plain = answer(pair, prompt, SAMPLINGS[name], speculation="off")
    assert len(plain.token_ids) == 40
    for block in BLOCKS:
        drafted = answer(pair, prompt, SAMPLINGS[name], speculation="fixed", block_length=block)
        assert drafted.token_ids == plain.token_ids, f"block length {block}"
        assert drafted.text == plain.text
        assert drafted.speculation.drafted_tokens > 0
    auto = answer(pair, prompt, SAMPLINGS[name], speculation="auto")
    assert auto.token_ids == plain.token_ids


def test_output_depends_on_neither_the_drafter_nor_copies(pair, other_pair):
    # Two tokens by turns as chance has it: text in which the last three often stood before.
    two = Sampling(temperature=1.0, seed=5, logit_bias={200: 60.0, 201: 60.0})
    drafted, copied = 0, 0
    for sampling in (*SAMPLINGS.values(), two):
        for prompt in PROMPTS[::2]:
            first = answer(pair, prompt, sampling, speculation="fixed", block_length=8)
            second = answer(other_pair, prompt, sampling, speculation="fixed", block_length=8)
            assert first.token_ids == second.token_ids
            assert first.speculation.copied_tokens == 0
            drafted += second.speculation.copied_tokens
            copied += second.speculation.accepted_copied_tokens
    assert 0 < copied < drafted, "copies are right in part, or this says little of them"


def test_blocks_are_accepted_in_part(pair):
    """Guards the tests above: they would say little if no draft token were ever accepted."""
    run = answer(pair, PROMPTS[1], SAMPLINGS["hot"], speculation="fixed", block_length=8)
    stats = run.speculation
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.acceptance_length > 1.2


def test_greedy_equals_transformers(pair):
    model = AutoModelForCausalLM.from_pretrained(pair.target_folder, dtype=torch.float32)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
        drafted = answer(pair, prompt, Sampling(), speculation="fixed", block_length=8)
        assert drafted.token_ids == expected


def test_a_seed_repeats_and_another_seed_differs(pair):
    sampling = SAMPLINGS["hot"]
    again = Sampling(temperature=4.0, seed=12)
    first = answer(pair, PROMPTS[0], sampling)
    assert answer(pair, PROMPTS[0], sampling).token_ids == first.token_ids
    assert answer(pair, PROMPTS[0], again).token_ids != first.token_ids


def test_tokens_equal_to_the_mask_are_ordinary(pair):
    """z-lab/dflash 73: outputs that held the mask token lost it."""
    for seed in range(100):
        sampling = Sampling(temperature=100.0, seed=seed)
        plain = answer(pair, PROMPTS[0], sampling, speculation="off")
        if MASK in plain.token_ids[:-1]:
            break
    else:
        raise AssertionError("no seed gave the mask token")
    drafted = answer(pair, PROMPTS[0], sampling, speculation="fixed", block_length=8)
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9])
def test_max_tokens_is_kept_exactly(pair, limit):
    with Client(pair.gateway) as client:
        plain = client.generate(
            PROMPTS[0], max_tokens=limit, ignore_eos=True, speculation="off"
        ).result()
        drafted = client.generate(
            PROMPTS[0], max_tokens=limit, ignore_eos=True, speculation="fixed", block_length=8
        ).result()
    assert len(plain.token_ids) == limit == drafted.usage.completion_tokens
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == "length"


def test_a_stop_id_ends_the_answer_in_any_round(pair):
    whole = answer(pair, PROMPTS[0], SAMPLINGS["hot"], speculation="off").token_ids
    for stop in sorted(set(whole[:12]) - {IM_END}):
        cut = whole.index(stop)
        with Client(pair.gateway) as client:
            run = client.generate(
                PROMPTS[0],
                max_tokens=40,
                sampling=SAMPLINGS["hot"],
                ignore_eos=True,
                stop_token_ids=[stop],
                speculation="fixed",
                block_length=8,
            ).result()
        assert run.finish_reason == "stop"
        assert [token for token in run.token_ids if token != stop] == whole[:cut]
