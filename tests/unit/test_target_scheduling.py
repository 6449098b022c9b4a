"""Whose turn it is, and what becomes of the jobs that nobody waits for any more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashduet.errors import Unavailable
from flashduet.kv.blocks import BlockPool
from target_service.scheduler import Scheduler
from target_service.session import ContextRows, Session
from tests.unit.ledger_engine import Recorder, session
from tests.unit.target_server_support import WAIT_S, eventually, slowed
from tests.unit.target_support import TinyTarget, load_tiny, prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    torch.set_num_threads(1)
    return load_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
async def scheduler(tiny: TinyTarget) -> AsyncIterator[Scheduler]:
    made = new_scheduler(tiny)
    made.start()
    yield made
    await made.close()


def new_scheduler(tiny: TinyTarget) -> Scheduler:
    pool = BlockPool(tiny.engine.kv.num_blocks, tiny.engine.kv.block_tokens)
    return Scheduler(tiny.engine, pool, max_step_tokens=256, chunk_tokens=8)


def fresh(length: int, **fields: object) -> Session:
    """A session that has no blocks yet."""
    return session(prompt(length), limit=400, **fields)


async def test_phases_follow_one_another(scheduler: Scheduler, tiny: TinyTarget) -> None:
    given = fresh(20)
    outcome = await scheduler.prefill(given, None)
    names = [phase.name for phase in outcome.phases]
    assert names == ["queue", "forward", "forward", "forward", "sample"]
    assert [phase.rows for phase in outcome.phases if phase.name == "forward"] == [8, 8, 4]
    assert outcome.chunks == 3
    ends = [phase.interval.end_ns for phase in outcome.phases]
    starts = [phase.interval.start_ns for phase in outcome.phases]
    assert all(end <= start + 1_000_000 for end, start in zip(ends, starts[1:], strict=False))


async def test_features_are_handed_over_in_order_and_only_while_wanted(
    scheduler: Scheduler, tiny: TinyTarget
) -> None:
    given, feed = fresh(20), Recorder()
    await scheduler.prefill(given, feed)
    outcome = await scheduler.verify(given, feed, 20, [5, 6])
    await scheduler.verify(given, None, given.anchor_position, [])
    # The next answer comes after what the ones before it had to hand over.
    assert feed.token_ids == given.token_ids[: 20 + outcome.accepted + 1]
    feed.layer_ids = ()
    await scheduler.verify(given, feed, given.anchor_position, [])
    await scheduler.verify(given, None, given.anchor_position, [])
    assert len(feed.token_ids) == 20 + outcome.accepted + 1, "nothing once nothing is wanted"


async def test_a_cancelled_prefill_stops_before_its_next_chunk(
    scheduler: Scheduler, tiny: TinyTarget
) -> None:
    given, feed = fresh(200), Recorder()
    with slowed(tiny, 0.05):
        task = asyncio.create_task(scheduler.prefill(given, feed))
        while not scheduler.steps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done = scheduler.steps
        await asyncio.sleep(0.2)
    assert scheduler.steps <= done + 1
    assert given.table.length < 200
    assert scheduler.queued_items == 0


async def test_a_prefill_cancelled_in_the_queue_is_never_begun(
    scheduler: Scheduler, tiny: TinyTarget
) -> None:
    running, waiting = fresh(8), fresh(8)
    with slowed(tiny, 1.0):
        first = asyncio.create_task(scheduler.prefill(running, None))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(scheduler.prefill(waiting, None))
        await asyncio.sleep(0)
        assert scheduler.queued_items == 1
        second.cancel()
        await asyncio.wait([second], timeout=WAIT_S)
        assert scheduler.queued_items == 0
        await first
    await asyncio.sleep(0.1)
    assert waiting.table.length == 0
    assert scheduler.steps == 1


async def test_a_failing_feed_costs_no_token(scheduler: Scheduler, tiny: TinyTarget) -> None:
    class Broken(Recorder):
        def publish(self, rows: ContextRows, traceparent: str) -> None:
            raise RuntimeError("broken")

    given = fresh(5)
    await asyncio.wait_for(scheduler.prefill(given, Broken()), WAIT_S)
    assert (await scheduler.verify(given, Broken(), given.anchor_position, [])).committed


async def test_closing_fails_what_waits(tiny: TinyTarget) -> None:
    scheduler = new_scheduler(tiny)
    scheduler.start()

    def start(given: Session) -> asyncio.Task:
        return asyncio.create_task(scheduler.prefill(given, None))

    with slowed(tiny, 0.1):
        tasks = [start(fresh(100)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await scheduler.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    assert all(isinstance(result, Unavailable) for result in results)
    with pytest.raises(Unavailable):
        await scheduler.prefill(fresh(5), None)


async def test_steps_that_nobody_waits_for_fail_in_silence(tiny: TinyTarget) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    scheduler, given = new_scheduler(tiny), fresh(5)
    scheduler.start()
    await scheduler.prefill(given, None)
    rounds = scheduler.rounds(given, None, given.anchor_position, [], more_steps=8)
    with slowed(tiny, 0.1):
        await anext(rounds)
        await scheduler.close()
    await asyncio.sleep(0)
    await rounds.aclose()
    del rounds
    gc.collect()
    assert not complaints


async def test_an_idle_engine_holds_no_session(scheduler: Scheduler, tiny: TinyTarget) -> None:
    given = fresh(20)
    alive = weakref.ref(given)
    await scheduler.prefill(given, None)
    await asyncio.sleep(0.1)
    scheduler.leave(given)
    del given

    async def is_gone() -> bool:
        gc.collect()
        return alive() is None

    await eventually(is_gone)


async def test_an_idle_engine_makes_no_steps(scheduler: Scheduler, tmp_path: Path) -> None:
    await asyncio.sleep(0.2)
    assert scheduler.steps == 0
