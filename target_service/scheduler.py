"""The one thread that runs the engine, and the way in and out of it.

The event loop gives sessions their jobs; the thread plans and makes one step after the other, sets
the jobs' futures in the loop, and hands features to the feeds. It waits for work, never for a peer.
One lock guards the roster; no step is made under it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import torch

from flashduet.errors import FlashduetError
from flashduet.kv.blocks import BlockPool
from target_service.job import FeatureFeed, Job, Outcome, PlainJob, PrefillJob, RoundJob
from target_service.kv_load import KVLoad
from target_service.planner import Turn
from target_service.roster import End, Roster, stopping
from target_service.session import Interval, Session, StepFailure, StepResult, WorkItem
from target_service.step_times import SizeTimes
from target_service.tracing import trace_publish

log = logging.getLogger(__name__)

# An idle thread looks up this often, should a wake-up ever be lost.
_IDLE_WAIT_S = 5.0
_JOIN_TIMEOUT_S = 30.0


class StepEngine(Protocol):
    """What the scheduler needs of an engine."""

    def step(self, items: Sequence[WorkItem]) -> list[StepResult | StepFailure]:
        """Compute all items, one result each, in order; their positions have their blocks."""


class Scheduler:
    """Made, started and closed in the event loop.

    A session is the scheduler's from its prefill until `leave`, which frees its blocks. The
    arguments are the roster's.
    """

    def __init__(
        self, engine: StepEngine, pool: BlockPool, *, max_step_tokens: int, chunk_tokens: int
    ) -> None:
        self.steps = 0
        self._engine = engine
        self._roster = Roster(pool, max_step_tokens=max_step_tokens, chunk_tokens=chunk_tokens)
        self._condition = threading.Condition()
        self._closing = False
        # So many sessions must be ready before the waiting thread is worth waking.
        self._wake_at = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread after its current step; waiting jobs fail with Unavailable."""
        with self._condition:
            self._closing = True
            ends = self._roster.close()
            self._condition.notify_all()
        self._settle(ends)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)

    @property
    def queued_items(self) -> int:
        return len(self._roster.ready)

    def kv_load(self) -> KVLoad:
        """What the blocks are used for, now and so far."""
        with self._condition:
            return KVLoad.of(self._roster.seating)

    def step_times(self) -> list[SizeTimes]:
        with self._condition:
            return self._roster.times.report()

    async def prefill(
        self, session: Session, feed: FeatureFeed | None, traceparent: str = ""
    ) -> Outcome:
        """Compute the session's tokens and choose the one after them.

        Cancelling the call takes it out of the engine before its next step.

        Raises:
            FlashduetError: the engine failed; the session is of no more use.
        """
        return await self._finish(PrefillJob(session, feed, traceparent))

    async def verify(
        self,
        session: Session,
        feed: FeatureFeed | None,
        base: int,
        token_ids: Sequence[int],
        traceparent: str = "",
    ) -> Outcome:
        """Verify a block on the session whose anchor is at `base`; see `prefill`."""
        return await self._finish(RoundJob(session, feed, traceparent, base, token_ids))

    async def rounds(
        self,
        session: Session,
        feed: FeatureFeed | None,
        base: int,
        token_ids: Sequence[int],
        traceparent: str = "",
        *,
        more_steps: int = 0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> AsyncGenerator[Outcome, None]:
        """`verify`, and plain steps after it until a stop id: an outcome each, as it is made.

        The engine makes them one after the other, whether or not the outcomes are taken, until the
        session leaves.
        """
        jobs: list[RoundJob] = []
        then = None
        for _ in range(more_steps):
            then = PlainJob(session, feed, traceparent, then, stop_ids)
            jobs.append(then)
        jobs.append(RoundJob(session, feed, traceparent, base, token_ids, then, stop_ids))
        self._enter(jobs[-1])
        for job in reversed(jobs):
            outcome = await self._outcome(job)
            yield outcome
            if outcome.committed[-1] in stop_ids:
                return

    def leave(self, session: Session) -> None:
        """Free the session's blocks, if need be as soon as the engine's current step is over."""
        with self._condition:
            self._roster.leave(session)
            # Others may wait for its blocks, or for the prefix that it will not compute now.
            self._condition.notify()

    async def _finish(self, job: Job) -> Outcome:
        self._enter(job)
        return await self._outcome(job)

    def _enter(self, job: Job) -> None:
        with self._condition:
            if self._closing:
                raise stopping()
            self._roster.add(job, time.perf_counter())
            if len(self._roster.ready) >= self._wake_at:
                self._condition.notify()

    async def _outcome(self, job: Job) -> Outcome:
        try:
            return await job.future
        except asyncio.CancelledError:
            with self._condition:
                self._roster.withdraw(job)
            raise

    def _run(self) -> None:
        # How many threads compute is a thread's own setting: take over the process's.
        torch.set_num_threads(torch.get_num_threads())
        # An idle thread must not hold a session by a variable, so a step is a call of its own.
        while self._go_on():
            pass

    def _go_on(self) -> bool:
        """A step; false when the scheduler closes. The thread outlives every mistake."""
        try:
            return self._run_step()
        except Exception as error:
            log.exception("the engine thread failed")
            failed = FlashduetError(f"the target engine failed: {type(error).__name__}")
            with self._condition:
                ends = self._roster.give_up(failed)
            self._settle(ends)
            return True

    def _run_step(self) -> bool:
        """One step; false when the scheduler closes."""
        turns = self._next_turns()
        if not turns:
            return False
        started = time.perf_counter()
        try:
            results = self._engine.step([turn.item for turn in turns])
        except Exception as error:
            log.exception("a step failed")
            results = [StepFailure(error)] * len(turns)
        now = time.perf_counter()
        with self._condition:
            self.steps += 1
            ends = self._roster.account(turns, results, now - started, now)
        self._settle(ends)
        for turn, result in zip(turns, results, strict=True):
            if isinstance(result, StepResult):
                _publish(turn, result)
        return True

    def _next_turns(self) -> tuple[Turn, ...]:
        """Wait for work; empty when the scheduler closes."""
        with self._condition:
            while not self._closing:
                plan = self._roster.plan(time.perf_counter())
                if plan.turns:
                    return plan.turns
                self._wake_at = plan.wake_at
                self._condition.wait(_IDLE_WAIT_S if plan.wait_s is None else plan.wait_s)
            return ()

    def _settle(self, ends: Sequence[End]) -> None:
        """Set futures in the event loop, all with one wake-up."""
        if not ends:
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_set_all, ends)
        except RuntimeError:
            log.debug("the event loop is gone; outcomes have no reader")


def _publish(turn: Turn, result: StepResult) -> None:
    """Hand features over: after the answer, which must not wait for it."""
    started, clock = time.time_ns(), time.perf_counter_ns()
    rows, feed, seat = result.context, turn.job.feed, turn.seat
    if feed is not None and rows is not None and not seat.leaving:
        try:
            feed.publish(rows, turn.job.traceparent)
            seat.session.draft_context_hit = rows.base + len(rows.token_ids)
        except Exception:
            log.exception("features of a session could not be handed over")
    interval = Interval(started, time.perf_counter_ns() - clock)
    seat.published_ns += interval.duration_ns
    trace_publish(turn.job.traceparent, interval, len(rows.token_ids) if rows else 0)


def _set_all(ends: Sequence[End]) -> None:
    for job, end in ends:
        if job.future.done():
            continue  # Its caller has gone.
        if isinstance(end, Exception):
            job.future.set_exception(end)
            # A round's follower is awaited only by a caller who stays; one who went is no mistake
            # of ours, which asyncio would take it for.
            job.future.exception()
        else:
            job.future.set_result(end)
