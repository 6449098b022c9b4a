"""Context buffers, the engine's steps, and the order in which the scheduler takes work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.context import ContextKV, ContextShape
from draft_service.engine import Engine
from draft_service.network import KeysValues
from draft_service.scheduler import ROWS_A_STEP, ROWS_BESIDE_PROPOSALS, Scheduler
from draft_service.work import IngestWork, ProposeWork, RewindWork, StepResult
from flashduet.sampling.choose import choose_drafts
from flashduet.sampling.params import Sampling
from tests.unit.drafting import Sequence, engine_of, features_for, until

SHAPE = ContextShape(2, 3, 4, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def engine(tiny_models: Path) -> Engine:
    return engine_of(tiny_models / "drafter", tiny_models / "target")


def rows_of(start: int, count: int) -> KeysValues:
    """Recognizable rows: row r holds r in keys and -r in values."""
    rows = torch.arange(start, start + count, dtype=torch.float32)
    keys = rows[None, None, :, None].expand(2, 3, count, 4)
    return KeysValues(keys, -keys)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 300)),
            st.tuples(st.just("truncate"), st.integers(0, 400)),
            st.tuples(st.just("block"), st.integers(1, 32)),
        ),
        max_size=12,
    )
)
def test_a_context_is_the_list_of_its_rows(steps: list[tuple[str, int]]) -> None:
    context, rows, fresh = ContextKV(SHAPE), list[int](), 0
    for step, size in steps:
        if step == "append":
            context.append(rows_of(fresh, size))
            rows += range(fresh, fresh + size)
            fresh += size
        elif step == "truncate":
            size = min(size, len(rows))
            context.truncate(size)
            del rows[size:]
        else:
            context.reserve(context.length + size)
            block = torch.full((size, 3, 4), 1e6)
            for layer in range(2):
                start = context.length // 2
                seen = context.with_block(layer, start, block, block)
                assert seen.keys[0, :, 0].tolist() == rows[start:] + [1e6] * size
        assert context.length == len(rows)
        held = context.rows()
        for layer in range(2):
            assert held.keys[layer, 1, :, 2].tolist() == rows
            assert held.values[layer, 2, :, 0].tolist() == [-row for row in rows]
        assert context.capacity <= max(128, 1.25 * (fresh + 32) + 128)


def test_a_context_cannot_be_cut_forwards() -> None:
    context = ContextKV(SHAPE)
    context.append(rows_of(0, 5))
    for length in (6, -1):
        with pytest.raises(ValueError, match="cut a context of 5 rows"):
            context.truncate(length)


def test_a_block_leaves_no_trace_in_the_context(engine: Engine) -> None:
    """The same proposal twice, with another in between, gives the same logits bit by bit."""
    sequence = Sequence.of(engine, 20)
    before = [part.clone() for part in sequence.context.rows()]
    first = engine.draft_logits([sequence.proposal(5, 8)])
    engine.draft_logits([sequence.proposal(99, 16)])
    assert torch.equal(engine.draft_logits([sequence.proposal(5, 8)]), first)
    for part, unchanged in zip(sequence.context.rows(), before, strict=True):
        assert torch.equal(part, unchanged)
    # Rows appended after proposals are what they are without them.
    more = features_for(engine, 6, seed=2)
    engine.step([IngestWork(sequence.context, 20, more)], [])
    whole = Sequence(engine.new_context(), torch.cat([sequence.features, more]))
    engine.step([IngestWork(whole.context, 0, whole.features)], [])
    for part, expected in zip(sequence.context.rows(), whole.context.rows(), strict=True):
        assert (part - expected).abs().max() < 1e-5


def test_the_way_rows_arrive_does_not_matter(engine: Engine) -> None:
    features = features_for(engine, 57)
    expected = None
    for cuts in ([57], [1] * 57, [20, 1, 36], [50, 7]):
        context, start = engine.new_context(), 0
        for rows in cuts:
            engine.step([IngestWork(context, start, features[start : start + rows])], [])
            start += rows
        logits = engine.draft_logits([ProposeWork(context, 57, 5, 8, Sampling(), 0)])
        expected = logits if expected is None else expected
        assert (logits - expected).abs().max() < 1e-4


def test_sessions_in_one_step_do_not_see_each_other(engine: Engine) -> None:
    alone = [Sequence.of(engine, rows, seed=rows) for rows in (3, 40, 17)]
    expected = [engine.draft_logits([s.proposal(i, 4 + i)]) for i, s in enumerate(alone)]
    fresh = [Sequence(engine.new_context(), s.features) for s in alone]
    engine.step([IngestWork(s.context, 0, s.features) for s in fresh], [])
    together = engine.draft_logits([s.proposal(i, 4 + i) for i, s in enumerate(fresh)])
    assert (together - torch.cat(expected)).abs().max() < 1e-4


def test_features_in_another_dtype_are_taken(engine: Engine) -> None:
    features = features_for(engine, 10).bfloat16()
    contexts = [engine.new_context(), engine.new_context()]
    engine.step([IngestWork(contexts[0], 0, features)], [])
    engine.step([IngestWork(contexts[1], 0, features.float())], [])
    assert torch.equal(contexts[0].rows().keys, contexts[1].rows().keys)


def test_a_step_checks_positions_before_it_changes_anything(engine: Engine) -> None:
    good, bad = Sequence.of(engine, 4), Sequence.of(engine, 4)
    rows = features_for(engine, 2)
    with pytest.raises(ValueError, match="position 5 for a context of 4 rows"):
        engine.step([IngestWork(good.context, 4, rows), IngestWork(bad.context, 5, rows)], [])
    assert (good.context.length, bad.context.length) == (4, 4)


def test_a_proposal_over_other_rows_is_not_drafted(engine: Engine) -> None:
    sequence = Sequence.of(engine, 6)
    right = sequence.proposal(5, 4)
    result = engine.step([], [replace(right, anchor_position=5), right])
    assert result.drafts[0] is None
    assert result.drafts[1] is not None


def test_slot_j_is_chosen_with_the_noise_of_its_own_position(engine: Engine) -> None:
    """The target chooses position a+j with the noise of a+j, so must the drafter."""
    sequence, sampling = Sequence.of(engine, 12), Sampling(temperature=2.0, top_k=50, seed=3)
    work = replace(sequence.proposal(5, 8, sampling), choice=2)
    expected = choose_drafts(engine.draft_logits([work]), 12 + 1, sampling, choice=2)
    other = sequence.proposal(6, 4)  # greedy, in the same step
    drafts = engine.step([], [other, work]).drafts
    assert drafts[1] is not None
    assert drafts[1].token_ids == expected.tokens
    assert drafts[1].confidence == pytest.approx(expected.confidence, abs=1e-5)
    assert drafts[0] is not None
    assert drafts[0].token_ids == engine.draft_logits([other]).argmax(-1).tolist()


def test_an_empty_context_drafts(engine: Engine) -> None:
    result = engine.step([], [Sequence.of(engine, 0).proposal(5, 4)])
    assert result.drafts[0] is not None
    assert len(result.drafts[0].token_ids) == 3


class Recorder(Engine):
    """An engine that notes each step's rows by context, and the contexts proposed for."""

    def __init__(self, engine: Engine) -> None:
        self.__dict__ = engine.__dict__
        self.steps: list[tuple[list[tuple[int, int, int]], list[int]]] = []

    def step(self, ingests, proposals) -> StepResult:  # type: ignore[no-untyped-def]
        self.steps.append(
            (
                [(id(w.context), w.base, w.rows) for w in ingests],
                [id(w.context) for w in proposals],
            )
        )
        return super().step(ingests, proposals)


@pytest.fixture
async def recorded(engine: Engine) -> AsyncIterator[tuple[Recorder, Scheduler]]:
    """A scheduler whose thread begins when the test says so."""
    recorder = Recorder(engine)
    scheduler = Scheduler(recorder)
    yield recorder, scheduler
    await scheduler.stop()


async def test_a_proposal_waits_for_its_own_rows_and_a_portion_of_others(
    engine: Engine, recorded: tuple[Recorder, Scheduler]
) -> None:
    recorder, scheduler = recorded
    prefill, urgent = engine.new_context(), engine.new_context()
    finished = asyncio.Event()
    rows = features_for(engine, 300)
    scheduler.ingest(IngestWork(prefill, 0, rows), lambda error: None)
    scheduler.ingest(IngestWork(prefill, 300, rows[:50]), lambda error: finished.set())
    scheduler.ingest(IngestWork(urgent, 0, rows[:100]), lambda error: None)
    proposal = asyncio.create_task(scheduler.propose(ProposeWork(urgent, 100, 5, 8, Sampling(), 0)))
    await asyncio.sleep(0)
    scheduler.start()
    assert (await asyncio.wait_for(proposal, 10)).drafts is not None
    await asyncio.wait_for(finished.wait(), 10)
    first_ingests, first_proposals = recorder.steps[0]
    assert first_proposals == [id(urgent)]
    assert (id(urgent), 0, 100) in first_ingests
    assert (id(prefill), 0, ROWS_BESIDE_PROPOSALS) in first_ingests
    assert (prefill.length, urgent.length) == (350, 100)
    expected = Sequence(engine.new_context(), torch.cat([rows, rows[:50]]))
    engine.step([IngestWork(expected.context, 0, expected.features)], [])
    assert (prefill.rows().keys - expected.context.rows().keys).abs().max() < 1e-5


async def test_rows_without_a_proposal_come_in_bounded_steps(
    engine: Engine, recorded: tuple[Recorder, Scheduler]
) -> None:
    recorder, scheduler = recorded
    contexts = [engine.new_context() for _ in range(3)]
    done = [asyncio.Event() for _ in contexts]
    for context, event in zip(contexts, done, strict=True):
        rows = features_for(engine, 400)
        scheduler.ingest(IngestWork(context, 0, rows), lambda error, event=event: event.set())
    scheduler.start()
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in done)), 10)
    assert [context.length for context in contexts] == [400] * 3
    assert all(sum(r for _, _, r in step) <= ROWS_A_STEP for step, _ in recorder.steps)


async def test_a_rewind_keeps_its_place_in_the_queue(
    engine: Engine, recorded: tuple[Recorder, Scheduler]
) -> None:
    _, scheduler = recorded
    context = engine.new_context()
    old, new = features_for(engine, 20, seed=1), features_for(engine, 20, seed=2)
    scheduler.ingest(IngestWork(context, 0, old), lambda error: None)
    scheduler.rewind(RewindWork(context, 8))
    scheduler.ingest(IngestWork(context, 8, new), lambda error: None)
    proposal = asyncio.create_task(scheduler.propose(ProposeWork(context, 28, 5, 8, Sampling(), 0)))
    await asyncio.sleep(0)
    scheduler.start()
    drafted = (await asyncio.wait_for(proposal, 10)).drafts
    expected = Sequence(engine.new_context(), torch.cat([old[:8], new]))
    result = engine.step(
        [IngestWork(expected.context, 0, expected.features)], [expected.proposal(5, 8)]
    )
    assert drafted == result.drafts[0]


async def test_dropped_and_cancelled_work_is_never_done(
    engine: Engine, recorded: tuple[Recorder, Scheduler]
) -> None:
    recorder, scheduler = recorded
    gone, kept = engine.new_context(), engine.new_context()
    called: list[str] = []
    rows = features_for(engine, 5)
    scheduler.ingest(IngestWork(gone, 0, rows), lambda error: called.append("gone"))
    scheduler.ingest(IngestWork(kept, 0, rows), lambda error: called.append("kept"))
    proposal = asyncio.create_task(scheduler.propose(ProposeWork(gone, 5, 5, 8, Sampling(), 0)))
    await asyncio.sleep(0)
    assert scheduler.queued_proposals == 1
    proposal.cancel()
    await asyncio.wait([proposal])
    scheduler.drop(gone)
    assert scheduler.queued_proposals == 0
    scheduler.start()
    await until(lambda: "kept" in called)
    assert called == ["kept"]
    assert all(not proposals for _, proposals in recorder.steps)
    assert gone.length == 0


async def test_what_follows_lost_rows_is_lost_with_them(
    engine: Engine,
    recorded: tuple[Recorder, Scheduler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else their positions would fail every later step that they share with other sessions."""
    _, scheduler = recorded
    context, other = engine.new_context(), engine.new_context()
    errors: list[BaseException | None] = []
    rows = features_for(engine, ROWS_A_STEP)
    fail = iter([True])
    whole = Recorder._ingest

    def fail_once(self: Recorder, ingests: list[IngestWork]) -> None:
        if next(fail, False):
            raise RuntimeError("out of memory")
        whole(self, ingests)

    monkeypatch.setattr(Recorder, "_ingest", fail_once)
    scheduler.ingest(IngestWork(context, 0, rows), errors.append)
    # These two would share the next step.
    scheduler.ingest(IngestWork(context, len(rows), rows[:10]), errors.append)
    scheduler.ingest(IngestWork(other, 0, rows[:20]), errors.append)
    scheduler.start()
    await until(lambda: len(errors) == 3)
    assert [error is None for error in errors] == [False, False, True]
    assert (context.length, other.length) == (0, 20)
