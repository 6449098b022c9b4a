"""The sessions that the engine serves, from their prefill until they leave: who is ready for a
step, what the step is, and what becomes of its results. No threads here, and no clock."""

from __future__ import annotations

from collections.abc import Sequence

from flashduet.errors import FlashduetError, Unavailable
from flashduet.kv.blocks import BlockPool
from target_service.job import Job, Outcome
from target_service.planner import Plan, Planner, Turn
from target_service.seat import Seat
from target_service.seating import Seating
from target_service.session import (
    PrefillChunk,
    Session,
    StepFailure,
    StepResult,
    VerifyBlock,
    WorkItem,
)
from target_service.step_times import StepSize, StepTimes, part_size

# How a job ended.
End = tuple[Job, Outcome | Exception]


class Roster:
    """Guarded by the scheduler's lock; `now` is a steady clock in seconds.

    Args:
        pool: blocks of the engine's store; nobody else touches it.
        max_step_tokens, chunk_tokens: see Planner.
    """

    def __init__(self, pool: BlockPool, *, max_step_tokens: int, chunk_tokens: int) -> None:
        self.seating = Seating(pool)
        self.times = StepTimes()
        self.ready: set[Seat] = set()
        self._planner = Planner(
            self.seating, self.times, max_step_tokens=max_step_tokens, chunk_tokens=chunk_tokens
        )
        self._seats: dict[Session, Seat] = {}
        self._entered = 0
        self._closing = False

    def add(self, job: Job, now: float) -> None:
        """A message has come; its session enters with the first one."""
        seat = self._seats.get(job.session)
        if seat is None:
            self._entered += 1
            seat = Seat(job.session, self._entered, now)
            self._seats[job.session] = seat
            self.seating.seats.add(seat)
        seat.take_job(job, now)
        self.ready.add(seat)

    def withdraw(self, job: Job) -> None:
        """Nobody waits for the job any more."""
        seat = self._seats.get(job.session)
        if seat is not None and seat.job is job:
            self.ready.discard(seat)
            seat.job = None

    def leave(self, session: Session) -> None:
        """The session is over: its blocks are free, or will be as soon as the step under way is."""
        seat = self._seats.pop(session, None)
        if seat is None:
            return
        self.ready.discard(seat)
        seat.leaving = True
        if not seat.in_step:
            self.seating.leave(seat)

    def close(self) -> list[End]:
        """Take no more work; the ends of the jobs that wait."""
        self._closing = True
        return self.give_up(stopping())

    def give_up(self, error: FlashduetError) -> list[End]:
        """End all jobs that wait, and any that an unfinished step left behind."""
        ends: list[End] = []
        for seat in self._seats.values():
            if seat.job is not None and (seat in self.ready or not self._closing):
                ends.append((seat.job, error))
                seat.job = None
                seat.in_step = False
        self.ready.clear()
        return ends

    def plan(self, now: float) -> Plan:
        """The next step; its sessions are in it until `account`."""
        plan = self._planner.plan(self.ready, now)
        for turn in plan.turns:
            turn.seat.in_step = True
            self.ready.discard(turn.seat)
        return plan

    def account(
        self,
        turns: Sequence[Turn],
        results: Sequence[StepResult | StepFailure],
        step_s: float,
        now: float,
    ) -> list[End]:
        """Take a step's results in; the jobs that ended with it."""
        ends: list[End] = []
        self._planner.free_since = now
        self.times.add(sum((_size(turn.item) for turn in turns), StepSize(0)), step_s)
        for turn, result in zip(turns, results, strict=True):
            seat, job = turn.seat, turn.job
            seat.in_step = False
            end = job.absorb(result, seat.published_ns)
            if isinstance(turn.item, PrefillChunk) and isinstance(result, StepResult):
                self.seating.publish(seat)
            if seat.leaving:
                self.seating.leave(seat)
            elif seat.job is not job:
                continue  # Withdrawn: its session is about to leave.
            elif end is None and not self._closing:
                self.ready.add(seat)
            else:
                seat.finish_job(now)
                ends.append((job, stopping() if end is None else end))
                follower = job.follower(end) if isinstance(end, Outcome) else None
                if follower is not None and not self._closing:
                    seat.take_job(follower, now)
                    self.ready.add(seat)
                elif follower is not None:
                    ends.append((follower, stopping()))
        return ends


def _size(item: WorkItem) -> StepSize:
    return part_size(len(item.token_ids) + isinstance(item, VerifyBlock), item.base)


def stopping() -> Unavailable:
    return Unavailable("the target service is stopping")
