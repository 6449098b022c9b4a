"""Which waiting jobs share the engine's next step: the policy, and nothing of the mechanism."""

from __future__ import annotations

from collections import deque

from target_service.job import Job, PrefillJob


class WorkQueue:
    """Rounds first, all that wait in one step; after each such step one chunk of one prefill.

    So a long prompt delays a round by one chunk at most, and rounds cannot starve a prompt.
    Prefills take turns. Not thread-safe: the scheduler's lock guards it.
    """

    def __init__(self) -> None:
        self._rounds: deque[Job] = deque()
        self._prefills: deque[Job] = deque()
        self._prefill_is_due = False

    def __len__(self) -> int:
        return len(self._rounds) + len(self._prefills)

    def add(self, job: Job) -> None:
        self._lane(job).append(job)

    def remove(self, job: Job) -> None:
        """Forget a job; one that is not queued is left alone."""
        if job in self._lane(job):
            self._lane(job).remove(job)

    def next_step(self) -> list[Job]:
        """Take the jobs of the next step out of the queue; empty when none waits."""
        if self._rounds and not (self._prefill_is_due and self._prefills):
            jobs = list(self._rounds)
            self._rounds.clear()
            self._prefill_is_due = True
            return jobs
        self._prefill_is_due = False
        return [self._prefills.popleft()] if self._prefills else []

    def drain(self) -> list[Job]:
        """Take everything out."""
        jobs = [*self._rounds, *self._prefills]
        self._rounds.clear()
        self._prefills.clear()
        return jobs

    def _lane(self, job: Job) -> deque[Job]:
        return self._prefills if isinstance(job, PrefillJob) else self._rounds
