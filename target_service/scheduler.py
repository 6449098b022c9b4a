"""The one thread that runs the engine, and the way in and out of it.

The event loop puts jobs into the queue; the thread takes them step by step, hands features to the
feed, and sets the job's future in the loop. It waits for work, never for a peer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from flashduet.errors import FlashduetError, Unavailable
from target_service.engine import Engine
from target_service.job import FeatureFeed, Job, Outcome, PrefillJob, RoundJob
from target_service.session import Interval, Session, StepFailure, StepResult
from target_service.work_queue import WorkQueue

log = logging.getLogger(__name__)

# An idle thread looks up this often, should a wake-up ever be lost.
_IDLE_WAIT_S = 5.0
_JOIN_TIMEOUT_S = 30.0


class Scheduler:
    """Made, started and closed in the event loop."""

    def __init__(self, engine: Engine, *, chunk_tokens: int) -> None:
        self.steps = 0
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._queue = WorkQueue()
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread after its current step; waiting jobs fail with Unavailable."""
        with self._condition:
            self._closing = True
            waiting = self._queue.drain()
            self._condition.notify_all()
        for job in waiting:
            self._fail(job, Unavailable("the target service is stopping"))
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)

    @property
    def queued_items(self) -> int:
        return len(self._queue)

    async def prefill(
        self, session: Session, feed: FeatureFeed | None, traceparent: str = ""
    ) -> Outcome:
        """Compute the session's tokens and choose the one after them.

        Cancelling the call takes it out of the engine before its next step.

        Raises:
            FlashduetError: the engine failed; the session is of no more use.
        """
        return await self._finish(PrefillJob(session, feed, traceparent, self._chunk_tokens))

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

    async def _finish(self, job: Job) -> Outcome:
        with self._condition:
            if self._closing:
                raise Unavailable("the target service is stopping")
            self._queue.add(job)
            self._condition.notify()
        try:
            return await job.future
        finally:
            with self._condition:
                job.abandoned = True
                self._queue.remove(job)

    def _run(self) -> None:
        # How many threads compute is a thread's own setting: take over the process's.
        torch.set_num_threads(torch.get_num_threads())
        # An idle thread must not hold a session by a variable, so a step is a call of its own.
        while self._run_step():
            pass

    def _run_step(self) -> bool:
        """One step; false when the scheduler closes."""
        jobs = self._next_jobs()
        try:
            self._step(jobs)
        except Exception as error:
            # The thread outlives everything that a step can do.
            log.exception("a step failed")
            for job in jobs:
                self._fail(job, error)
        return bool(jobs)

    def _next_jobs(self) -> list[Job]:
        """Wait for work; empty when the scheduler closes."""
        with self._condition:
            while not self._closing:
                if jobs := self._queue.next_step():
                    return jobs
                self._condition.wait(_IDLE_WAIT_S)
            return []

    def _step(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        for job in jobs:
            job.started()
        results = self._engine.step([job.next_item() for job in jobs])
        self.steps += 1
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, StepFailure):
                self._fail(job, result.error)
            else:
                self._advance(job, result)

    def _advance(self, job: Job, result: StepResult) -> None:
        job.add_phase("forward", result.forward, result.rows)
        if result.committed:
            job.add_phase("sample", result.sample, len(result.committed))
        started, clock = time.time_ns(), time.perf_counter_ns()
        if job.feed is not None and result.context is not None and not job.abandoned:
            # Before the answer, so that a proposal made on it finds its context on the way.
            job.feed.publish(result.context, job.traceparent)
        sent = len(result.context.token_ids) if result.context else 0
        job.add_phase("publish", Interval(started, time.perf_counter_ns() - clock), sent)
        outcome = job.absorb(result)
        if outcome is not None:
            self._in_loop(_settle, job.future, outcome)
            return
        with self._condition:
            if self._closing:
                self._fail(job, Unavailable("the target service is stopping"))
            elif not job.abandoned:
                self._queue.add(job)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, FlashduetError):
            log.error("session %s failed", job.session.session_id.hex(), exc_info=error)
            error = FlashduetError(f"the target engine failed: {type(error).__name__}")
        self._in_loop(_settle, job.future, error)

    def _in_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("the event loop is gone; an outcome has no reader")


def _settle(future: asyncio.Future[Outcome], end: Outcome | Exception) -> None:
    """Set the future, unless its caller has gone."""
    if future.done():
        return
    if isinstance(end, Exception):
        future.set_exception(end)
    else:
        future.set_result(end)
