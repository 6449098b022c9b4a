"""Targets of other families over the whole stack: drafted, undrafted and Transformers agree."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flashduet.client import Client
from flashduet.sampling.params import Sampling
from tests.support.pair import PATIENCE, Pair
from tests.support.tiny import tiny_drafter, tiny_target

LENGTH = 40
# Past every sliding window (24 tokens) and across prefill chunks.
PROMPTS = [[5, 9, 77], [(7 * n) % 250 + 4 for n in range(90)]]


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "gpt_oss", "mixtral"])
def family_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    root: Path = tmp_path_factory.mktemp(request.param)
    target = tiny_target(root / "target", request.param)
    drafter = tiny_drafter(root / "drafter", target)
    running = Pair(target, drafter, root / "traces", FLASHDUET_DRAFT_LOOKUP="0", **PATIENCE)
    yield running
    running.stop()


def answer(pair: Pair, prompt: list[int], sampling: Sampling, **options):
    with Client(pair.gateway) as client:
        return client.generate(
            prompt, max_tokens=LENGTH, sampling=sampling, ignore_eos=True, timeout=240, **options
        ).result()


def test_drafted_undrafted_and_transformers_agree(family_pair: Pair):
    model = AutoModelForCausalLM.from_pretrained(family_pair.target_folder, dtype=torch.float32)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            truth = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=LENGTH,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
        assert len(set(truth)) > 3, "an answer of one token repeated would hide mistakes"
        assert answer(family_pair, prompt, Sampling(), speculation="off").token_ids == truth
        for block in (2, 8, 16):
            run = answer(family_pair, prompt, Sampling(), speculation="fixed", block_length=block)
            assert run.token_ids == truth, f"block length {block}"
            assert run.speculation.drafted_tokens > 0


def test_sampled_answers_do_not_depend_on_drafting(family_pair: Pair):
    accepted = 0
    for prompt in PROMPTS:
        hot = Sampling(temperature=20.0, seed=11)
        plain = answer(family_pair, prompt, hot, speculation="off")
        for block in (4, 16):
            run = answer(family_pair, prompt, hot, speculation="fixed", block_length=block)
            assert run.token_ids == plain.token_ids
            assert run.text == plain.text
            accepted += run.speculation.accepted_tokens
    assert accepted > 0, "rollback after a block accepted in part must have happened"
    family_pair.assert_nothing_left()
