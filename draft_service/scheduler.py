"""One engine thread, and the order in which it works: latency first.

A proposal waits for nothing but its own context's rows. Rows of other contexts come between steps
of proposals in bounded portions, so that a long prefill neither holds up another session's round
nor starves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draft_service.context import Context
from draft_service.engine import Engine
from draft_service.work import Drafts, IngestWork, ProposeWork, RewindWork, StepTimes
from flashduet.step_times import StepTimesBySize

# Rows of other contexts between two steps of proposals: a few milliseconds on a CPU.
ROWS_BETWEEN_PROPOSALS = 64
ROWS_A_STEP = 512

log = logging.getLogger(__name__)

# Called on the event loop when rows are in the context, or (with the error) when they are lost.
IngestDone = Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal's outcome: None where the context had other rows than it needs."""

    drafts: Drafts | None
    times: StepTimes


# A proposal's, or the error of its step.
Outcome = Drafted | BaseException

# Called on the event loop with a proposal's outcome.
Proposed = Callable[[Outcome], None]


@dataclass(eq=False, slots=True)
class _Ingest:
    work: IngestWork | RewindWork
    done: IngestDone | None = None


@dataclass(eq=False, slots=True)
class Ticket:
    """A proposal in the queue or under way; `done` is None once nobody wants it."""

    work: ProposeWork
    done: Proposed | None


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step does: rewinds have been applied when it was chosen."""

    ingests: list[IngestWork]
    finished: list[IngestDone]
    proposals: list[Ticket]


class Scheduler:
    """The queue in front of an engine. Every method is for the event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.step_times = StepTimesBySize()
        self._lock = threading.Condition()
        self._ingests: list[_Ingest] = []
        self._proposals: list[Ticket] = []
        self._stopping = False
        # Whether the last step was one of proposals, so that rows have their turn.
        self._rows_are_next = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    def start(self) -> None:
        """Begin to work; results are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End after the step under way; what is still queued is dropped."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)

    @property
    def queued_proposals(self) -> int:
        return len(self._proposals)

    def ingest(self, work: IngestWork, done: IngestDone) -> None:
        """Queue rows for their context; `done` is called once they are in it."""
        self._put(_Ingest(work, done))

    def rewind(self, work: RewindWork) -> None:
        """Cut a context back. Rows beyond the cut that still wait are forgotten: their blocks may
        be another's by the time they would be written."""
        with self._lock:
            left = []
            for item in self._ingests:
                of_context = item.work.context is work.context
                if of_context and isinstance(item.work, IngestWork) and item.work.end > work.length:
                    if item.work.base >= work.length:
                        continue
                    item.work, _ = item.work.split(work.length - item.work.base)
                left.append(item)
            self._ingests = left
        self._put(_Ingest(work))

    def propose(self, work: ProposeWork, done: Proposed) -> Ticket:
        """Draft a block, and call `done` unless the proposal is withdrawn first."""
        ticket = Ticket(work, done)
        with self._lock:
            self._proposals.append(ticket)
            self._lock.notify()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take a proposal out of the queue; if it is under way, nobody is told of its outcome."""
        ticket.done = None
        with self._lock:
            if ticket in self._proposals:
                self._proposals.remove(ticket)

    def drop(self, context: Context) -> None:
        """Forget all that is queued for a context, uncalled: its session is closed."""
        with self._lock:
            self._ingests = [item for item in self._ingests if item.work.context is not context]

    def _put(self, item: _Ingest) -> None:
        with self._lock:
            self._ingests.append(item)
            self._lock.notify()

    def _run(self) -> None:
        # How many threads compute is a thread's own setting: take over the process's.
        torch.set_num_threads(torch.get_num_threads())
        while (step := self._wait()) is not None:
            self._do(step)
            del step  # an idle thread must not keep a closed session's memory

    def _wait(self) -> _Step | None:
        """The next step, as soon as there is work; None when it is time to end."""
        with self._lock:
            while not (self._stopping or self._ingests or self._proposals):
                self._lock.wait()
            return None if self._stopping else self._next_step()

    def _next_step(self) -> _Step:
        """Policy: the proposals and what their contexts still lack; else rows, or after a step of
        proposals a portion of them."""
        drafting = bool(self._proposals) and not (self._rows_are_next and self._ingests)
        room = ROWS_BETWEEN_PROPOSALS if self._proposals else ROWS_A_STEP
        proposals: list[Ticket] = []
        if drafting:
            proposals, self._proposals, room = self._proposals, [], 0
        self._rows_are_next = drafting
        urgent = {id(proposal.work.context) for proposal in proposals}
        step = _Step([], [], proposals)
        left: list[_Ingest] = []
        # Contexts whose rows were left: what follows of theirs is left too, for order's sake.
        held: set[int] = set()
        for item in self._ingests:
            context, work = item.work.context, item.work
            if id(context) in held:
                left.append(item)
            elif isinstance(work, RewindWork):
                # Rows of the same context chosen for this step must be in before the cut.
                if any(chosen.context is context for chosen in step.ingests):
                    held.add(id(context))
                    left.append(item)  # the proposals that need it are put back below
                else:
                    context.truncate(min(work.length, context.length))
            elif id(context) in urgent:
                self._take(step, item, work)
            elif room <= 0:
                held.add(id(context))
                left.append(item)
            elif work.rows > room:
                now, later = work.split(room)
                step.ingests.append(now)
                left.append(_Ingest(later, item.done))
                held.add(id(context))
                room = 0
            else:
                self._take(step, item, work)
                room -= work.rows
        self._ingests = left
        self._proposals += [p for p in proposals if id(p.work.context) in held]
        step.proposals[:] = [p for p in proposals if id(p.work.context) not in held]
        return step

    @staticmethod
    def _take(step: _Step, item: _Ingest, work: IngestWork) -> None:
        step.ingests.append(work)
        if item.done is not None:
            step.finished.append(item.done)

    def _do(self, step: _Step) -> None:
        # One bad step must not end the service.
        try:
            taken = self._engine.take(step.ingests, [p.work for p in step.proposals])
        except Exception as error:
            log.exception("a step failed")
            lost = [*step.finished, *self._lost_with(step)]
            self._tell(lost, error, [(ticket, error) for ticket in step.proposals])
            return
        rows, times, finished = sum(work.rows for work in step.ingests), taken.times, step.finished
        told: list[tuple[Ticket, Outcome]] = []
        left: list[Ticket] = []
        for ticket, drafts in zip(step.proposals, taken.drafts, strict=True):
            if drafts is None:
                left.append(ticket)
            else:
                told.append((ticket, Drafted(drafts, times)))
        if left:
            if told:
                # Copies leave before the others' pass.
                self._tell(finished, None, told)
                finished, told = [], []
            try:
                result = self._engine.draft([ticket.work for ticket in left])
            except Exception as error:
                log.exception("a pass of the drafter failed")
                self._tell(finished, None, [(ticket, error) for ticket in left])
                return
            times = result.times.since(times)
            rows += sum(ticket.work.block_length for ticket in left)
            told = [
                (ticket, Drafted(drafts, times))
                for ticket, drafts in zip(left, result.drafts, strict=True)
            ]
        if rows:
            self.step_times.add(rows, times.sampled_ns - times.start_ns)
        self._tell(finished, None, told)

    def _lost_with(self, step: _Step) -> list[IngestDone]:
        """Take out of the queue what cannot follow the rows that a failed step has lost."""
        lost = {id(work.context) for work in step.ingests}
        with self._lock:
            followers = [item for item in self._ingests if id(item.work.context) in lost]
            self._ingests = [item for item in self._ingests if id(item.work.context) not in lost]
        return [item.done for item in followers if item.done is not None]

    def _tell(
        self,
        finished: Sequence[IngestDone],
        error: BaseException | None,
        outcomes: Sequence[tuple[Ticket, Outcome]],
    ) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, finished, error, outcomes)
        except RuntimeError:
            log.warning("the event loop is closed; a step's results are dropped")

    @staticmethod
    def _deliver(
        finished: Sequence[IngestDone],
        error: BaseException | None,
        outcomes: Sequence[tuple[Ticket, Outcome]],
    ) -> None:
        for done in finished:
            done(error)
        for ticket, outcome in outcomes:
            if ticket.done is not None:
                ticket.done(outcome)
