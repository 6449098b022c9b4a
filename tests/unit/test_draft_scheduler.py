"""The order in which the scheduler takes work, and what becomes of it."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from draft_service.scheduler import ROWS_A_STEP, Drafted, Scheduler
from draft_service.work import IngestWork, ProposeWork, RewindWork, StepResult
from tests.unit.drafting import WAIT_S, DraftingEngine, Sequence, engine_of, features_for, until


@pytest.fixture(scope="module")
def engine(tiny_models: Path) -> DraftingEngine:
    return engine_of(tiny_models / "drafter", tiny_models / "target")


async def proposed(scheduler: Scheduler, work: ProposeWork) -> Drafted:
    """A proposal's outcome."""
    outcome = asyncio.get_running_loop().create_future()
    scheduler.propose(work, outcome.set_result)
    drafted = await outcome
    assert isinstance(drafted, Drafted)
    return drafted


class Recorder(DraftingEngine):
    """An engine that notes each step's rows by context, and the contexts proposed for."""

    def __init__(self, engine: DraftingEngine) -> None:
        self.__dict__ = engine.__dict__
        self.steps: list[tuple[list[tuple[int, int, int]], list[int]]] = []

    def take(self, ingests, proposals) -> StepResult:  # type: ignore[no-untyped-def]
        self.steps.append(
            (
                [(id(w.context), w.base, w.rows) for w in ingests],
                [id(w.context) for w in proposals],
            )
        )
        return super().take(ingests, proposals)


@pytest.fixture
async def recorded(engine: DraftingEngine) -> AsyncIterator[tuple[Recorder, Scheduler]]:
    """A scheduler whose thread begins when the test says so."""
    recorder = Recorder(engine)
    scheduler = Scheduler(recorder)
    yield recorder, scheduler
    await scheduler.stop()


async def test_a_proposal_waits_for_its_own_rows_and_others_come_after_it(
    engine: DraftingEngine, recorded: tuple[Recorder, Scheduler]
) -> None:
    recorder, scheduler = recorded
    prefill, urgent = engine.new_context(), engine.new_context()
    finished = asyncio.Event()
    rows = features_for(engine, 300)
    scheduler.ingest(engine.ingest_work(prefill, 0, rows), lambda error: None)
    scheduler.ingest(engine.ingest_work(prefill, 300, rows[:50]), lambda error: finished.set())
    scheduler.ingest(engine.ingest_work(urgent, 0, rows[:100]), lambda error: None)
    proposal = asyncio.create_task(proposed(scheduler, engine.proposal(urgent, 100)))
    await asyncio.sleep(0)
    scheduler.start()
    assert (await asyncio.wait_for(proposal, WAIT_S)).drafts is not None
    await asyncio.wait_for(finished.wait(), WAIT_S)
    assert recorder.steps[0] == ([(id(urgent.engine), 0, 100)], [id(urgent.engine)])
    assert recorder.steps[1] == ([(id(prefill.engine), 0, 300), (id(prefill.engine), 300, 50)], [])
    assert (prefill.engine.length, urgent.engine.length) == (350, 100)
    expected = Sequence.made_of(engine, torch.cat([rows, rows[:50]]))
    written = engine.rows(prefill).keys
    assert (written - engine.rows(expected.context).keys).abs().max() < 1e-5


async def test_proposals_and_rows_of_others_take_turns(
    engine: DraftingEngine, recorded: tuple[Recorder, Scheduler]
) -> None:
    """However many proposals wait, a prefill goes on, and costs each of them a portion at most."""
    recorder, scheduler = recorded
    prefill, rows = engine.new_context(), features_for(engine, 150)
    scheduler.ingest(engine.ingest_work(prefill, 0, rows), lambda error: None)
    drafting = engine.new_context()
    whole = Recorder.take

    def while_others_wait(self: Recorder, ingests: list, proposals: list) -> StepResult:
        # Another proposal is there before the step ends, as with many sessions.
        if len(self.steps) < 6:
            scheduler.propose(engine.proposal(drafting, 0), lambda outcome: None)
        return whole(self, ingests, proposals)

    Recorder.take = while_others_wait  # type: ignore[method-assign]
    try:
        scheduler.propose(engine.proposal(drafting, 0), lambda outcome: None)
        scheduler.start()
        await until(lambda: prefill.engine.length == 150)
    finally:
        Recorder.take = whole  # type: ignore[method-assign]
    kinds = [
        (bool(proposals), sum(n for _, _, n in ingests)) for ingests, proposals in recorder.steps
    ]
    assert kinds[:6] == [(True, 0), (False, 64), (True, 0), (False, 64), (True, 0), (False, 22)]


async def test_rows_without_a_proposal_come_in_bounded_steps(
    engine: DraftingEngine, recorded: tuple[Recorder, Scheduler]
) -> None:
    recorder, scheduler = recorded
    contexts = [engine.new_context() for _ in range(3)]
    done = [asyncio.Event() for _ in contexts]
    for context, event in zip(contexts, done, strict=True):
        rows = features_for(engine, 400)
        scheduler.ingest(
            engine.ingest_work(context, 0, rows), lambda error, event=event: event.set()
        )
    scheduler.start()
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in done)), WAIT_S)
    assert [context.engine.length for context in contexts] == [400] * 3
    assert all(sum(r for _, _, r in step) <= ROWS_A_STEP for step, _ in recorder.steps)


async def test_a_rewind_keeps_its_place_in_the_queue(
    engine: DraftingEngine, recorded: tuple[Recorder, Scheduler]
) -> None:
    _, scheduler = recorded
    context = engine.new_context()
    old, new = features_for(engine, 20, seed=1), features_for(engine, 20, seed=2)
    scheduler.ingest(engine.ingest_work(context, 0, old), lambda error: None)
    scheduler.rewind(RewindWork(context.engine, 8))
    scheduler.ingest(engine.ingest_work(context, 8, new), lambda error: None)
    proposal = asyncio.create_task(proposed(scheduler, engine.proposal(context, 28)))
    await asyncio.sleep(0)
    scheduler.start()
    drafted = (await asyncio.wait_for(proposal, WAIT_S)).drafts
    expected = Sequence.made_of(engine, torch.cat([old[:8], new]))
    result = engine.step([], [expected.proposal(5, 8)])
    assert drafted == result.drafts[0]


async def test_rows_beyond_a_cut_are_never_written(
    engine: DraftingEngine, recorded: tuple[Recorder, Scheduler]
) -> None:
    """Their blocks may be another session's by then."""
    recorder, scheduler = recorded
    context, called = engine.new_context(), list[str]()
    rows = features_for(engine, 10)
    for base in (0, 10, 20):
        work = engine.ingest_work(context, base, rows)
        scheduler.ingest(work, lambda error, base=base: called.append(str(base)))
    scheduler.rewind(RewindWork(context.engine, 13))
    scheduler.start()
    await until(lambda: called == ["0", "10"])
    assert sum(count for step, _ in recorder.steps for _, _, count in step) == 13
    assert context.engine.length == 13


async def test_dropped_and_cancelled_work_is_never_done(
    engine: DraftingEngine, recorded: tuple[Recorder, Scheduler]
) -> None:
    recorder, scheduler = recorded
    gone, kept = engine.new_context(), engine.new_context()
    called: list[str] = []
    rows = features_for(engine, 5)
    scheduler.ingest(engine.ingest_work(gone, 0, rows), lambda error: called.append("gone"))
    scheduler.ingest(engine.ingest_work(kept, 0, rows), lambda error: called.append("kept"))
    ticket = scheduler.propose(engine.proposal(gone, 5), lambda outcome: called.append("drafted"))
    assert scheduler.queued_proposals == 1
    scheduler.withdraw(ticket)
    scheduler.drop(gone.engine)
    assert scheduler.queued_proposals == 0
    scheduler.start()
    await until(lambda: "kept" in called)
    assert called == ["kept"]
    assert all(not proposals for _, proposals in recorder.steps)
    assert gone.engine.length == 0


async def test_what_follows_lost_rows_is_lost_with_them(
    engine: DraftingEngine,
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
    scheduler.ingest(engine.ingest_work(context, 0, rows), errors.append)
    # These two would share the next step.
    scheduler.ingest(engine.ingest_work(context, len(rows), rows[:10]), errors.append)
    scheduler.ingest(engine.ingest_work(other, 0, rows[:20]), errors.append)
    scheduler.start()
    await until(lambda: len(errors) == 3)
    assert [error is None for error in errors] == [False, False, True]
    assert (context.engine.length, other.engine.length) == (0, 20)


async def test_copies_count_as_no_rows_of_a_step(
    engine: DraftingEngine,
    recorded: tuple[Recorder, Scheduler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_lookup", 3)
    _, scheduler = recorded
    context = engine.new_context()
    scheduler.ingest(engine.ingest_work(context, 0, features_for(engine, 10)), lambda error: None)
    proposal = asyncio.create_task(proposed(scheduler, engine.proposal(context, 10, 7)))
    await asyncio.sleep(0)
    scheduler.start()
    drafts = (await asyncio.wait_for(proposal, WAIT_S)).drafts
    assert drafts is not None
    assert drafts.without_pass
    assert [entry.max_tokens for entry in scheduler.step_times.to_proto()] == [16]


def fed_twice(engine: DraftingEngine, scheduler: Scheduler) -> tuple[ProposeWork, ProposeWork]:
    """Proposals of one step over two contexts: what repeats itself, and what does not."""
    works = []
    for anchor in (7, 5):
        context = engine.new_context()
        rows = features_for(engine, 10)
        scheduler.ingest(engine.ingest_work(context, 0, rows), lambda error: None)
        works.append(engine.proposal(context, 10, anchor))
    return works[0], works[1]


async def test_a_copy_leaves_before_a_pass_of_its_step(
    engine: DraftingEngine,
    recorded: tuple[Recorder, Scheduler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_lookup", 3)
    recorder, scheduler = recorded
    may_go, whole = threading.Event(), DraftingEngine.draft

    def slow(self: DraftingEngine, proposals: list[ProposeWork]) -> StepResult:
        assert may_go.wait(WAIT_S)
        return whole(self, proposals)

    monkeypatch.setattr(Recorder, "draft", slow)
    tasks = [asyncio.create_task(proposed(scheduler, w)) for w in fed_twice(engine, scheduler)]
    await asyncio.sleep(0)
    scheduler.start()
    copied = await asyncio.wait_for(tasks[0], WAIT_S)
    assert not tasks[1].done()
    may_go.set()
    drafted = await asyncio.wait_for(tasks[1], WAIT_S)
    assert len(recorder.steps) == 1, "they were of one step"
    assert copied.drafts is not None
    assert drafted.drafts is not None
    assert (copied.drafts.without_pass, drafted.drafts.without_pass) == (True, False)
    assert copied.times.start_ns == drafted.times.start_ns
    assert copied.times.sampled_ns < drafted.times.forwarded_ns


async def test_a_failing_pass_takes_neither_rows_nor_copies_with_it(
    engine: DraftingEngine,
    recorded: tuple[Recorder, Scheduler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_lookup", 3)
    _, scheduler = recorded

    def broken(self: DraftingEngine, proposals: list[ProposeWork]) -> StepResult:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Recorder, "draft", broken)
    outcomes: dict[int, object] = {}
    errors: list[BaseException | None] = []
    copied, drafted = fed_twice(engine, scheduler)
    late = engine.new_context()
    scheduler.ingest(engine.ingest_work(late, 0, features_for(engine, 4)), errors.append)
    for work in (copied, drafted, engine.proposal(late, 4)):
        scheduler.propose(work, functools.partial(outcomes.__setitem__, id(work.context)))
    scheduler.start()
    await until(lambda: len(outcomes) == 3)
    assert isinstance(outcomes[id(copied.context)], Drafted)
    assert isinstance(outcomes[id(drafted.context)], RuntimeError)
    assert isinstance(outcomes[id(late.engine)], RuntimeError)
    assert errors == [None]
    assert late.engine.length == 4
