"""Whose turn it is, and what becomes of the jobs that nobody waits for any more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from flashduet.errors import FlashduetError, Unavailable
from target_service.job import Job, PrefillJob, RoundJob
from target_service.scheduler import Scheduler
from target_service.session import ContextRows, Session
from target_service.work_queue import WorkQueue
from tests.unit.target_server_support import slowed
from tests.unit.target_support import TinyTarget, load_tiny, prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    torch.set_num_threads(1)
    return load_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
async def scheduler(tiny: TinyTarget) -> AsyncIterator[Scheduler]:
    made = Scheduler(tiny.engine, chunk_tokens=8)
    made.start()
    yield made
    await made.close()


class Recorder:
    """A feed that keeps what it gets."""

    def __init__(self, layer_ids: tuple[int, ...] = (1,)) -> None:
        self.layer_ids = layer_ids
        self.rows: list[ContextRows] = []

    def publish(self, rows: ContextRows, traceparent: str) -> None:
        self.rows.append(rows)


def jobs(tiny: TinyTarget, kinds: str) -> list[Job]:
    """A job a letter: p for a prefill, r for a round."""
    sessions = [tiny.session(prompt(5)) for _ in kinds]
    return [
        PrefillJob(session, None, "", 8) if kind == "p" else RoundJob(session, None, "", 4, [])
        for kind, session in zip(kinds, sessions, strict=True)
    ]


async def test_rounds_go_first_and_prefills_take_turns_between_them(tiny: TinyTarget) -> None:
    queue, (p1, p2, r1, r2, r3, r4) = WorkQueue(), jobs(tiny, "pprrrr")
    for job in (p1, r1, p2, r2):
        queue.add(job)
    assert len(queue) == 4
    assert queue.next_step() == [r1, r2]
    queue.add(r3)
    assert queue.next_step() == [p1], "one chunk after each step of rounds"
    queue.add(p1)
    queue.add(r4)
    assert queue.next_step() == [r3, r4]
    assert queue.next_step() == [p2], "prefills take turns"
    assert queue.next_step() == [p1]
    assert queue.next_step() == []


async def test_a_removed_job_gets_no_turn(tiny: TinyTarget) -> None:
    queue, (prefill, round_) = WorkQueue(), jobs(tiny, "pr")
    for job in (prefill, round_):
        queue.add(job)
        queue.remove(job)
        queue.remove(job)
    assert (len(queue), queue.next_step()) == (0, [])


async def test_phases_follow_one_another(scheduler: Scheduler, tiny: TinyTarget) -> None:
    session = tiny.session(prompt(20))
    outcome = await scheduler.prefill(session, None)
    names = [phase.name for phase in outcome.phases]
    chunk = ["forward", "publish"]
    assert names == ["queue", *chunk, *chunk, "forward", "sample", "publish"]
    assert [phase.rows for phase in outcome.phases if phase.name == "forward"] == [8, 8, 4]
    assert outcome.chunks == 3
    ends = [phase.interval.end_ns for phase in outcome.phases]
    starts = [phase.interval.start_ns for phase in outcome.phases]
    assert all(end <= start + 1_000_000 for end, start in zip(ends, starts[1:], strict=False))


async def test_features_are_handed_over_before_the_answer(
    scheduler: Scheduler, tiny: TinyTarget
) -> None:
    session, feed = tiny.session(prompt(20)), Recorder()
    await scheduler.prefill(session, feed)
    assert [(rows.base, len(rows.token_ids)) for rows in feed.rows] == [(0, 8), (8, 8), (16, 4)]
    outcome = await scheduler.verify(session, feed, 20, [5, 6])
    assert feed.rows[-1].base == 20
    assert len(feed.rows[-1].token_ids) == outcome.accepted + 1
    feed.layer_ids = ()
    await scheduler.verify(session, feed, session.anchor_position, [])
    assert len(feed.rows) == 4, "nothing more once nothing is wanted"


async def test_a_cancelled_prefill_stops_before_its_next_chunk(
    scheduler: Scheduler, tiny: TinyTarget
) -> None:
    session, feed = tiny.session(prompt(200)), Recorder()
    with slowed(tiny, 0.05):
        task = asyncio.create_task(scheduler.prefill(session, feed))
        await asyncio.sleep(0.12)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done = scheduler.steps
        await asyncio.sleep(0.2)
    assert scheduler.steps <= done + 1
    assert session.table.length < 100
    assert scheduler.queued_items == 0


async def test_a_prefill_cancelled_in_the_queue_is_never_begun(
    scheduler: Scheduler, tiny: TinyTarget
) -> None:
    running, waiting = tiny.session(prompt(8)), tiny.session(prompt(8))
    with slowed(tiny, 0.2):
        first = asyncio.create_task(scheduler.prefill(running, None))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(scheduler.prefill(waiting, None))
        await asyncio.sleep(0)
        assert scheduler.queued_items == 1
        second.cancel()
        await asyncio.wait([second], timeout=5)
        assert scheduler.queued_items == 0
        await first
    await asyncio.sleep(0.1)
    assert waiting.table.length == 0
    assert scheduler.steps == 1


async def test_a_failing_feed_does_not_stop_the_thread(
    scheduler: Scheduler, tiny: TinyTarget
) -> None:
    class Broken(Recorder):
        def publish(self, rows: ContextRows, traceparent: str) -> None:
            raise RuntimeError("broken")

    with pytest.raises(FlashduetError):
        await asyncio.wait_for(scheduler.prefill(tiny.session(prompt(5)), Broken()), 10)
    assert (await scheduler.prefill(tiny.session(prompt(5)), None)).committed


async def test_closing_fails_what_waits(tiny: TinyTarget) -> None:
    scheduler = Scheduler(tiny.engine, chunk_tokens=8)
    scheduler.start()

    def start(session: Session) -> asyncio.Task:
        return asyncio.create_task(scheduler.prefill(session, None))

    with slowed(tiny, 0.1):
        tasks = [start(tiny.session(prompt(100))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await scheduler.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert all(isinstance(result, Unavailable) for result in results)
    with pytest.raises(Unavailable):
        await scheduler.prefill(tiny.session(prompt(5)), None)


async def test_an_idle_engine_holds_no_session(scheduler: Scheduler, tiny: TinyTarget) -> None:
    session = tiny.session(prompt(20))
    alive = weakref.ref(session)
    await scheduler.prefill(session, None)
    await asyncio.sleep(0.1)
    del session
    gc.collect()
    assert alive() is None


async def test_an_idle_engine_makes_no_steps(scheduler: Scheduler, tmp_path: Path) -> None:
    await asyncio.sleep(0.2)
    assert scheduler.steps == 0
