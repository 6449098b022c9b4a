"""DFlash 2 against the official package: logits, and the selector's walk over them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlash2DraftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flashduet.errors import CheckpointError
from flashduet.sampling.choose import choose_draft_blocks
from flashduet.sampling.noise import gumbel
from flashduet.sampling.params import Sampling
from tests.support.tiny import tiny_drafter, tiny_target
from tests.unit.drafter_formats import change, make_dflash2
from tests.unit.drafting import engine_of, features_for
from tests.unit.test_drafter_oracle import COMMITTED, LIMIT, PROMPT, official_cache, official_logits

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one position": {"kernel": 1},
    "as long as a block": {"kernel": 6, "group": 64},
    "a group a channel": {"kernel": 2, "group": 1, "top_k": 2},
    "all candidates": {"top_k": 320, "rank": 3},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("dflash2") / "target", "llama")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_path_equal_the_official_ones(name: str, target: Path, tmp_path: Path) -> None:
    folder = make_dflash2(tiny_drafter(tmp_path / "drafter", target), **SHAPES[name])
    official = DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    whole_target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    engine = engine_of(folder, target)
    context, cache = engine.new_context(), official_cache(official)
    start, rows, alone = 0, PROMPT, 0
    for round, committed in enumerate(COMMITTED):
        new = features_for(engine, rows, seed=round)
        engine.ingest(context, start, new)
        start += rows
        anchor, length = (7 * round + 11) % 300, 8 - round % 3
        hidden: list[torch.Tensor] = []
        handle = official.norm.register_forward_hook(
            lambda *call, hidden=hidden: hidden.append(call[2])
        )
        theirs = official_logits(official, whole_target, cache, new, start, anchor, length)
        handle.remove()
        work = engine.proposal(context, start, anchor, length)
        logits = engine.draft_logits([work])
        assert (logits - theirs).abs().max() < LIMIT
        with torch.inference_mode():
            path, _, _ = official.propose(
                hidden[0][:, 1 - length :], torch.tensor([anchor]), whole_target.lm_head, 0.0
            )
        drafts = engine.step([], [work]).drafts[0]
        assert drafts is not None
        assert drafts.token_ids == path[0].tolist()
        assert all(0 < each <= 1 for each in drafts.confidence)
        alone += drafts.token_ids != logits.argmax(-1).tolist()
        rows = committed
    assert alone, "the selector changed nothing"


def test_blocks_in_one_step_neither_convolve_nor_walk_into_each_other(
    target: Path, tmp_path: Path
) -> None:
    engine = engine_of(make_dflash2(tiny_drafter(tmp_path / "drafter", target)), target)
    contexts = [engine.new_context() for _ in range(3)]
    for i, context in enumerate(contexts):
        engine.ingest(context, 0, features_for(engine, 9 + i, seed=i))
    works = [engine.proposal(c, 9 + i, 20 + i, 5 + i) for i, c in enumerate(contexts)]
    alone = [engine.draft_logits([work]) for work in works]
    assert (engine.draft_logits(works) - torch.cat(alone)).abs().max() < 1e-4
    single = [engine.step([], [work]).drafts[0] for work in works]
    together = engine.step([], works).drafts
    assert [d and d.token_ids for d in together] == [d and d.token_ids for d in single]


def test_sampled_walks_add_the_noise_once(target: Path, tmp_path: Path) -> None:
    """With all tokens as candidates, slot by slot, it is argmax((logit + pair) / T + noise)."""
    folder = make_dflash2(tiny_drafter(tmp_path / "drafter", target), top_k=320)
    engine = engine_of(folder, target)
    context = engine.new_context()
    engine.ingest(context, 0, features_for(engine, 12))
    sampling = Sampling(temperature=1.7, seed=9)
    work = engine.proposal(context, 12, 33, 8, sampling, choice=2)
    selector = engine.network.candidate_selector
    assert selector is not None
    with torch.inference_mode():
        hidden, logits = engine._forward([work])
        projected, previous, expected = selector.hidden_projection(hidden), 33, []
        for slot in range(7):
            pairs = selector.successor_codebook @ (
                selector.predecessor_codebook[previous] * projected[slot]
            )
            noise = gumbel(9, 2, 13 + slot, torch.arange(320))
            scores = (logits[slot] + pairs).double() / 1.7 + noise
            previous = int(scores.argmax())
            expected.append(previous)
    drafts = engine.step([], [work]).drafts[0]
    assert drafts is not None
    assert drafts.token_ids == expected


def test_the_winner_without_a_selector_is_always_a_candidate(target: Path, tmp_path: Path) -> None:
    """With one candidate a slot and no pairs, the drafts are plain position-keyed draws."""
    folder = make_dflash2(tiny_drafter(tmp_path / "drafter", target), top_k=1)
    nothing = {f"candidate_selector.{s}_codebook": torch.zeros(320, 6) for s in ("predecessor",)}
    change(folder, nothing)
    engine = engine_of(folder, target)
    context = engine.new_context()
    engine.ingest(context, 0, features_for(engine, 12))
    for seed in range(8):
        sampling = Sampling(temperature=4.0, top_k=(0, 2)[seed % 2], seed=seed)
        work = engine.proposal(context, 12, 33, 8, sampling)
        with torch.inference_mode():
            _, logits = engine._forward([work])
            [plain] = choose_draft_blocks(logits, engine._chooser._blocks([work], [7]))
        drafts = engine.step([], [work]).drafts[0]
        assert drafts is not None
        assert drafts.token_ids == plain.tokens


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({"layers.1.mlp_conv.base_kernel": None}, {}, "layers.1.mlp_conv.base_kernel: expected"),
        (
            {"candidate_selector.successor_codebook": torch.zeros(319, 6)},
            {},
            "candidate_selector.successor_codebook: expected shape [320, 6], found [319, 6]",
        ),
        ({}, {"dflash_config": {"mask_token_id": 3, "conv_kernel_size": 3}}, "conv_group_size"),
        (
            {},
            {
                "dflash_config": {
                    "mask_token_id": 3,
                    "conv_kernel_size": 3,
                    "conv_group_size": 7,
                    "selector_rank": 6,
                    "selector_top_k": 5,
                }
            },
            "conv_group_size: expected a divisor of hidden_size 64, found 7",
        ),
    ],
)
def test_incomplete_checkpoints_are_refused_by_name(
    target: Path, tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    folder = make_dflash2(tiny_drafter(tmp_path / "drafter", target))
    change(folder, tensors, **config)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        engine_of(folder, target)


def test_codebooks_stored_as_modules_are_read(target: Path, tmp_path: Path) -> None:
    folder = make_dflash2(tiny_drafter(tmp_path / "drafter", target))
    plain = engine_of(folder, target)
    name = "candidate_selector.predecessor_codebook"
    codebook = load_file(folder / "model.safetensors")[name]
    change(folder, {name: None, f"{name}.weight": codebook})
    renamed = engine_of(folder, target)
    assert renamed.network.candidate_selector is not None
    assert plain.network.candidate_selector is not None
    assert torch.equal(
        renamed.network.candidate_selector.predecessor_codebook,
        plain.network.candidate_selector.predecessor_codebook,
    )
