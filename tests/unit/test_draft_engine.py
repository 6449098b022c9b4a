"""The engine's steps: packed rows of several sessions over blocks of context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashduet.sampling.choose import choose_drafts
from flashduet.sampling.params import Sampling
from tests.unit.drafting import DraftingEngine, Sequence, engine_of, features_for


@pytest.fixture(scope="module")
def engine(tiny_models: Path) -> DraftingEngine:
    return engine_of(tiny_models / "drafter", tiny_models / "target")


def test_a_block_leaves_no_trace_in_the_context(engine: DraftingEngine) -> None:
    """The same proposal twice, with another in between, gives the same logits bit by bit."""
    sequence = Sequence.of(engine, 20)
    before = engine.rows(sequence.context)
    first = engine.draft_logits([sequence.proposal(5, 8)])
    engine.draft_logits([sequence.proposal(99, 16)])
    assert torch.equal(engine.draft_logits([sequence.proposal(5, 8)]), first)
    for part, unchanged in zip(engine.rows(sequence.context), before, strict=True):
        assert torch.equal(part, unchanged)
    # Rows appended after proposals are what they are without them.
    more = features_for(engine, 6, seed=2)
    engine.ingest(sequence.context, 20, more)
    whole = Sequence.made_of(engine, torch.cat([sequence.features, more]))
    rows, whole_rows = engine.rows(sequence.context), engine.rows(whole.context)
    for part, expected in zip(rows, whole_rows, strict=True):
        assert (part - expected).abs().max() < 1e-5


def test_the_way_rows_arrive_does_not_matter(engine: DraftingEngine) -> None:
    features = features_for(engine, 57)
    expected = None
    for cuts in ([57], [1] * 57, [20, 1, 36], [50, 7]):
        context, start = engine.new_context(), 0
        for rows in cuts:
            engine.ingest(context, start, features[start : start + rows])
            start += rows
        logits = engine.draft_logits([engine.proposal(context, 57)])
        expected = logits if expected is None else expected
        assert (logits - expected).abs().max() < 1e-4


def test_sessions_in_one_step_do_not_see_each_other(engine: DraftingEngine) -> None:
    alone = [Sequence.of(engine, rows, seed=rows) for rows in (3, 40, 17)]
    expected = [engine.draft_logits([s.proposal(i, 4 + i)]) for i, s in enumerate(alone)]
    fresh = [Sequence(engine, engine.new_context(), s.features) for s in alone]
    engine.step([engine.ingest_work(s.context, 0, s.features) for s in fresh], [])
    together = engine.draft_logits([s.proposal(i, 4 + i) for i, s in enumerate(fresh)])
    assert (together - torch.cat(expected)).abs().max() < 1e-4


def test_features_in_another_dtype_are_taken(engine: DraftingEngine) -> None:
    features = features_for(engine, 10).bfloat16()
    contexts = [engine.new_context(), engine.new_context()]
    engine.ingest(contexts[0], 0, features)
    engine.ingest(contexts[1], 0, features.float())
    assert torch.equal(engine.rows(contexts[0]).keys, engine.rows(contexts[1]).keys)


def test_a_step_checks_positions_before_it_changes_anything(engine: DraftingEngine) -> None:
    good, bad = Sequence.of(engine, 4), Sequence.of(engine, 4)
    rows = features_for(engine, 2)
    with pytest.raises(ValueError, match="position 5 for a context of 4 rows"):
        engine.step(
            [engine.ingest_work(good.context, 4, rows), engine.ingest_work(bad.context, 5, rows)],
            [],
        )
    full = replace(engine.ingest_work(good.context, 4, rows), block_ids=())
    with pytest.raises(ValueError, match="0 blocks of 16 are held"):
        engine.step([full], [])
    assert (good.context.engine.length, bad.context.engine.length) == (4, 4)


def test_a_proposal_over_other_rows_is_not_drafted(engine: DraftingEngine) -> None:
    sequence = Sequence.of(engine, 6)
    right = sequence.proposal(5, 4)
    result = engine.step([], [replace(right, anchor_position=5), right])
    assert result.drafts[0] is None
    assert result.drafts[1] is not None


def test_slot_j_is_chosen_with_the_noise_of_its_own_position(engine: DraftingEngine) -> None:
    """The target chooses position a+j with the noise of a+j, so must the drafter."""
    sequence, sampling = Sequence.of(engine, 12), Sampling(temperature=2.0, top_k=50, seed=3)
    work = sequence.proposal(5, 8, sampling, choice=2)
    expected = choose_drafts(engine.draft_logits([work]), 12 + 1, sampling, choice=2)
    other = sequence.proposal(6, 4)  # greedy, in the same step
    drafts = engine.step([], [other, work]).drafts
    assert drafts[1] is not None
    assert drafts[1].token_ids == expected.tokens
    assert drafts[1].confidence == pytest.approx(expected.confidence, abs=1e-5)
    assert drafts[0] is not None
    assert drafts[0].token_ids == engine.draft_logits([other]).argmax(-1).tolist()


def test_an_empty_context_drafts(engine: DraftingEngine) -> None:
    result = engine.step([], [Sequence.of(engine, 0).proposal(5, 4)])
    assert result.drafts[0] is not None
    assert len(result.drafts[0].token_ids) == 3
