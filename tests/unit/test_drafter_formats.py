"""Checkpoints of other trainers draft like their z-lab twin, or are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.checkpoint import load_checkpoint, load_drafter
from draft_service.formats import CheckpointFormat
from draft_service.shortlist import FILE, build_shortlist, read_shortlist, write_shortlist
from flashduet.errors import CheckpointError
from flashduet.sampling.params import Sampling
from tests.support.tiny import MASK, tiny_drafter, tiny_target
from tests.unit.drafter_formats import as_specforge, as_speculators, change, make_dflash2
from tests.unit.drafting import DraftingEngine, engine_of, features_for

LIMIT = 1e-5
VOCABULARY = 320


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("formats") / "target", "llama")


@pytest.fixture
def twin(tmp_path: Path, target: Path) -> Path:
    return tiny_drafter(tmp_path / "twin", target)


def logits(engine: DraftingEngine, rows: int = 19, block_length: int = 8) -> torch.Tensor:
    context = engine.new_context()
    engine.ingest(context, 0, features_for(engine, rows))
    return engine.draft_logits([engine.proposal(context, rows, 33, block_length)])


def drafts(engine: DraftingEngine, sampling: Sampling | None = None) -> list[int]:
    context = engine.new_context()
    engine.ingest(context, 0, features_for(engine, 19))
    (drafted,) = engine.step([], [engine.proposal(context, 19, 33, 8, sampling)]).drafts
    assert drafted is not None
    return drafted.token_ids


SLIDING = {
    "layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 5,
}


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ({}, {}),
        (SLIDING, {}),
        (SLIDING | {"is_causal": False}, {"sliding_window_non_causal": True}),
        ({"attention_bias": False, "rms_norm_eps": 1e-3}, {"projector_type": "dflash"}),
    ],
)
def test_a_speculators_folder_gives_the_logits_of_its_twin(
    target: Path, tmp_path: Path, variant: dict[str, Any], more: dict[str, Any]
) -> None:
    twin = tiny_drafter(tmp_path / "twin", target, **variant)
    folder = as_speculators(twin, tmp_path / "speculators", **more)
    assert load_checkpoint(folder).kind is CheckpointFormat.SPECULATORS
    ours, theirs = engine_of(twin, target), engine_of(folder, target)
    assert theirs.config.target_layer_ids == ours.config.target_layer_ids == (0, 2, 2)
    assert torch.equal(logits(ours), logits(theirs))


def test_a_specforge_folder_gives_the_logits_of_its_twin(target: Path, twin: Path) -> None:
    folder = as_specforge(twin, twin.parent / "specforge")
    assert load_checkpoint(folder).kind is CheckpointFormat.SPECFORGE
    assert len(load_file(folder / "model.safetensors")) < len(load_file(twin / "model.safetensors"))
    assert torch.equal(logits(engine_of(twin, target)), logits(engine_of(folder, target)))


def test_an_own_embedding_and_head_are_used(target: Path, twin: Path) -> None:
    """The target's would give something else; the same ones stored in the checkpoint the same."""
    stored = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    plain = logits(engine_of(twin, target))
    folder = as_speculators(twin, twin.parent / "own")
    change(folder, {"embed_tokens.weight": stored, "lm_head.weight": stored})
    assert torch.equal(logits(engine_of(folder, target)), plain)
    change(folder, {"embed_tokens.weight": stored * 1.5})
    assert (logits(engine_of(folder, target)) - plain).abs().max() > 1e-2
    change(folder, {"embed_tokens.weight": None, "lm_head.weight": stored * 2.0})
    assert torch.allclose(logits(engine_of(folder, target)), plain * 2.0)
    with pytest.raises(CheckpointError, match="speculators checkpoint with its own"):
        load_drafter(folder)


def test_a_head_over_a_draft_vocabulary_drafts_target_ids(target: Path, twin: Path) -> None:
    stored = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    # In no order, as an offset map may have it.
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:40]
    kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    kept[ids] = True
    maps: dict[str, torch.Tensor | None] = {"d2t": ids - torch.arange(40), "t2d": kept}
    folder = as_speculators(twin, twin.parent / "partial", draft_vocab_size=40)
    change(folder, {"lm_head.weight": stored[ids], **maps})
    whole, partial = engine_of(twin, target), engine_of(folder, target)
    assert torch.allclose(logits(partial), logits(whole)[:, ids.sort().values], atol=LIMIT)
    # What the whole head drafts if it is all but forbidden the other tokens.
    forbidden = dict.fromkeys((~kept).nonzero()[:, 0].tolist(), -100.0)
    favoured = int(ids[7])
    for terms in ({}, {"temperature": 2.0, "seed": 4}, {"temperature": 3.0, "top_k": 5}):
        for bias in ({}, {favoured: 3.0}):
            expected = drafts(whole, Sampling(**terms, logit_bias=forbidden | bias))
            assert drafts(partial, Sampling(**terms, logit_bias=bias)) == expected
    change(folder, {"t2d": None})
    assert torch.equal(logits(engine_of(folder, target)), logits(partial))


def test_slots_that_predict_what_follows_them(target: Path, twin: Path) -> None:
    """B inputs give B drafts: the same network, read one slot earlier."""
    folder = as_speculators(twin, twin.parent / "anchored", sample_from_anchor=True)
    shifted, plain = engine_of(folder, target), engine_of(twin, target)
    assert (shifted.config.block_length, plain.config.block_length) == (9, 8)
    longer = logits(shifted, block_length=9)
    assert longer.shape[0] == 8
    # The anchor's slot is the one that the other kind never reads.
    assert torch.allclose(longer[1:], logits(plain, block_length=8), atol=LIMIT)


def test_a_separate_embedding_of_the_mask(target: Path, twin: Path) -> None:
    stored = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    plain = logits(engine_of(twin, target))
    folder = as_specforge(twin, twin.parent / "masked")
    change(
        folder,
        {"model.mask_embedding": stored[MASK][None]},
        dflash_config={"target_layer_ids": [0, 2, 2]},
    )
    assert torch.equal(logits(engine_of(folder, target)), plain)
    change(folder, {"model.mask_embedding": stored[9]})
    engine = engine_of(folder, target)
    assert (logits(engine) - plain).abs().max() > 1e-2
    # An anchor that has the mask token's id is an ordinary token.
    context = engine.new_context()
    engine.ingest(context, 0, features_for(engine, 19))
    anchors = [engine.draft_logits([engine.proposal(context, 19, a)]) for a in (0, 9)]
    assert (anchors[0] - anchors[1]).abs().max() > 1e-3


def test_a_target_of_another_width(tmp_path: Path, target: Path) -> None:
    """Features are as wide as the target, everything else as the drafter, which brings its own."""
    wide = tiny_target(tmp_path / "wide", "llama", hidden_size=96, num_attention_heads=6)
    folder = tiny_drafter(tmp_path / "drafter", target)
    narrow = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    change(
        folder,
        {
            "embed_tokens.weight": narrow,
            "lm_head.weight": narrow,
            "fc.weight": torch.randn(64, 3 * 96),
        },
        target_hidden_size=96,
    )
    engine = engine_of(folder, wide)
    assert engine.config.feature_width == 288
    assert logits(engine).shape == (7, VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({"speculators_model_type": "dspark"}, {}, "speculators_model_type: expected dflash"),
        ({"aux_hidden_state_layer_ids": None}, {}, "aux_hidden_state_layer_ids: expected a list"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, {}, "numbers from 1"),
        ({"mask_token_id": None}, {}, "mask_token_id: expected a whole number"),
        ({"transformer_layer_config": 3}, {}, "transformer_layer_config: expected an object"),
        ({"block_size": "8"}, {}, "block_size: expected a whole number of at least 2"),
        ({"projector_type": "domino"}, {}, "projector_type: expected dflash, found 'domino'"),
        ({"sample_from_anchor": 1}, {}, "sample_from_anchor: expected true or false, found 1"),
        ({"draft_vocab_size": 40}, {}, "d2t: expected this map of a draft vocabulary of 40"),
        ({}, {"d2t": torch.zeros(40, dtype=torch.int64)}, "d2t: expected 320 rows, found 40"),
        (
            {"draft_vocab_size": 4},
            {"d2t": torch.tensor([5, 4, 3, 2])},
            "d2t: expected different token ids below 320",
        ),
        (
            {"draft_vocab_size": 2},
            {"d2t": torch.tensor([5, 6])},
            "lm_head.weight: expected a head of 2 rows for the draft vocabulary, found none",
        ),
        ({}, {"t2d": torch.ones(9, dtype=torch.bool)}, "t2d: expected shape [320], found [9]"),
        ({}, {"lm_head.weight": torch.zeros(4, 64)}, "lm_head.weight: expected shape [320, 64]"),
        ({}, {"markov_head.weight": torch.zeros(4)}, "markov_head.weight: expected only the 25"),
        ({}, {"layers.1.self_attn.v_proj.weight": None}, "layers.1.self_attn.v_proj.weight"),
    ],
)  # fmt: skip
def test_wrong_speculators_checkpoints_are_refused_by_name(
    twin: Path, changes: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    folder = as_speculators(twin, twin.parent / "wrong")
    change(folder, tensors, **changes)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_checkpoint(folder)


def test_a_joined_projection_of_another_size_is_refused(twin: Path) -> None:
    folder = as_specforge(twin, twin.parent / "specforge")
    change(folder, {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(100, 64)})
    words = "layers.0.self_attn.qkv_proj.weight: expected shape [128, 64], found [100, 64]"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_checkpoint(folder)


# ---------------------------------------------------------------- the shortlist


def test_a_shortlist_has_the_most_frequent_tokens_and_those_wanted() -> None:
    counts = [5, 0, 9, 9, 1, 7]
    assert build_shortlist(counts, 3).tolist() == [2, 3, 5]
    assert build_shortlist(counts, 3, always=[1, 1]).tolist() == [1, 2, 3]
    assert build_shortlist(counts, 99).tolist() == [0, 1, 2, 3, 4, 5]
    for size, always in ((1, [1, 2]), (3, [6]), (0, [])):
        with pytest.raises(ValueError, match=r"shortlist of|token ids must be"):
            build_shortlist(counts, size, always)


@pytest.mark.parametrize("dflash2", [False, True])
def test_a_shortlist_limits_drafts_and_changes_nothing_else(
    target: Path, twin: Path, dflash2: bool
) -> None:
    if dflash2:
        make_dflash2(twin, top_k=4)
    whole = engine_of(twin, target)
    ids = build_shortlist(torch.arange(VOCABULARY) % 7, 60, always=[0, 3])
    write_shortlist(twin, ids)
    cut = engine_of(twin, target)
    assert torch.allclose(logits(cut), logits(whole)[:, ids], atol=LIMIT)
    for sampling in (Sampling(), Sampling(temperature=3.0, seed=2, top_k=20)):
        assert set(drafts(cut, sampling)) <= set(ids.tolist())
    # The official reader takes model.safetensors alone.
    load_checkpoint(twin)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"token_ids": torch.tensor([3, 2])}, "expected ascending ids below 320"),
        ({"token_ids": torch.tensor([3, 320])}, "expected ascending ids below 320"),
        ({"token_ids": torch.tensor([3.0])}, "token_ids: expected int64 [k], found torch.float32"),
        ({"ids": torch.tensor([3])}, "expected the tensor token_ids, found ['ids']"),
    ],
)
def test_wrong_shortlists_are_refused(
    target: Path, twin: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    save_file(tensors, twin / FILE)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        engine_of(twin, target)
    (twin / FILE).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="expected a whole safetensors file"):
        read_shortlist(twin, VOCABULARY)
