"""A session's place in the scheduler: its work, its turn, and how it keeps time."""

from __future__ import annotations

from dataclasses import dataclass, field

from target_service.job import Job
from target_service.session import Session

# Weight of the newest gap in the usual one.
_NEWEST = 0.3
# Longer than this between its rounds and nobody is waiting for the next one.
_BETWEEN_ROUNDS_S = 0.5
# A batch session counts as so much younger than it is. So interactive ones come first, and none
# waits for ever: in the end it is older than all that came later.
_BATCH_AGE_S = 30.0
# The same for each of its turns, which come more often.
_BATCH_WAIT_S = 2.0


@dataclass(slots=True, eq=False)
class Seat:
    """Guarded by the scheduler's lock.

    Attributes:
        number: counts the seats; tells those of one moment apart.
        entered: when it was taken, on the scheduler's clock; seconds.
        job: what the session waits for; None between its rounds.
        in_step: the engine is at it: its blocks must stay.
        leaving: nobody waits for it any more; it is freed after the step.
        running: its blocks hold, or are being filled with, its tokens; false before its first
            chunk and after a preemption.
        counted: its prompt is in the totals.
        turn: when its turn to be prefilled began, or when its round came; the earliest goes first.
        turn_tokens: computed in this turn.
        chain: digests of its full blocks, made when first needed.
        claimed: those that it computes for all who wait for them.
        waits_for: the block that another one computes for it.
        answered: when its last answer left; None before the first.
        usual_gap_s, gap_spread_s: between an answer and the next round; how far it is off that.
        usual_rows: of its rounds.
        published_ns: spent on handing its features over since its last answer.
    """

    session: Session
    number: int
    entered: float
    job: Job | None = None
    in_step: bool = False
    leaving: bool = False
    running: bool = False
    counted: bool = False
    turn: float = 0.0
    turn_tokens: int = 0
    chain: list[bytes] | None = None
    claimed: list[bytes] = field(default_factory=list)
    waits_for: bytes | None = None
    answered: float | None = None
    usual_gap_s: float = 0.005
    gap_spread_s: float = 0.005
    usual_rows: int = 1
    published_ns: int = 0

    @property
    def age_key(self) -> tuple[float, int]:
        """Older seats have smaller ones, and may take the blocks of younger ones."""
        return self.entered + (_BATCH_AGE_S if self.session.batch else 0.0), self.number

    @property
    def turn_key(self) -> tuple[float, int]:
        """Whose turn comes first has the smallest."""
        return self.turn + (_BATCH_WAIT_S if self.session.batch else 0.0), self.number

    def take_job(self, job: Job, now: float) -> None:
        """A message has come."""
        if self.answered is not None:
            off_s = now - self.answered - self.usual_gap_s
            self.usual_gap_s += _NEWEST * off_s
            self.gap_spread_s += _NEWEST * (abs(off_s) - self.gap_spread_s)
        self.job, self.turn, self.turn_tokens = job, now, 0

    def finish_job(self, now: float) -> None:
        """Its answer leaves."""
        self.job, self.answered, self.published_ns = None, now, 0

    def decoding(self, now: float) -> bool:
        """Whether it has answered and its next round is there or comes soon."""
        if self.answered is None or not self.running:
            return False
        return self.job is not None or now - self.answered < _BETWEEN_ROUNDS_S

    def idle(self, now: float, seconds: float) -> bool:
        """Whether nothing has been asked of it for so long."""
        return self.job is None and now - (self.answered or self.entered) > seconds

    def expected(self) -> float:
        """When its next round should come, while it is between two."""
        return (self.answered or self.entered) + self.usual_gap_s
