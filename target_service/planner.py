"""What the engine's next step computes: policy alone, without threads and without a clock."""

from __future__ import annotations

from dataclasses import dataclass

from target_service.job import Job, RoundJob
from target_service.pacing import Pacing
from target_service.seat import Seat
from target_service.seating import Seating
from target_service.session import WorkItem
from target_service.step_times import StepSize, StepTimes, part_size

# A long prompt goes behind those that came meanwhile after so many tokens.
_TURN_TOKENS = 512
# Sessions that wait for blocks look again this often, should nobody tell them.
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One session's part of a step."""

    seat: Seat
    job: Job
    item: WorkItem


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, or how long to wait for more to do; None means until something happens."""

    turns: tuple[Turn, ...] = ()
    wait_s: float | None = None


class Planner:
    """Rounds first, all that are there; then prompts, in turns, as far as rounds do not suffer.

    Guarded by the scheduler's lock; `now` is the scheduler's clock in seconds.

    Args:
        max_step_tokens: rows of a step.
        chunk_tokens: of them, of one prompt.
    """

    def __init__(
        self, seating: Seating, times: StepTimes, *, max_step_tokens: int, chunk_tokens: int
    ) -> None:
        self._seating = seating
        self._pacing = Pacing(times, max_step_tokens)
        self._max_step_tokens = max_step_tokens
        self._chunk_tokens = chunk_tokens

    def plan(self, ready: set[Seat], now: float) -> Plan:
        """The next step of the sessions in `ready`; no step is under way."""
        if not ready:
            return Plan()
        due: list[Seat] = []
        unfinished: list[Seat] = []
        for seat in ready:
            (unfinished if not seat.running or _missing(seat) else due).append(seat)
        rounds, size = self._rounds(due)
        # Nobody else to wait for and no prompt to pace: the usual way of a lone session.
        if not unfinished and len(ready) == len(self._seating.seats):
            return Plan(self._seated(rounds, now))
        decoding = [seat for seat in self._seating.seats if seat.decoding(now)]
        if rounds:
            until = self._pacing.gather_until(due, decoding, size, now)
            if until is not None:
                return Plan(wait_s=until - now)
        ask_again = now + _LOOK_AGAIN_S
        if unfinished:
            protected = [seat for seat in decoding if not seat.session.batch]
            unfinished.sort(key=_turn_key)
            context = unfinished[0].session.table.length
            allowance = self._pacing.allowance(size, protected, context, now)
            ask_again = allowance.ask_again or ask_again
            rounds |= self._chunks(unfinished, allowance.tokens, now)
        turns = self._seated(rounds, now)
        return Plan(turns) if turns else Plan(wait_s=ask_again - now)

    def _rounds(self, due: list[Seat]) -> tuple[dict[Seat, int], StepSize]:
        """Rows of each round that fits into the step, in the order of their turns; their sum."""
        rounds: dict[Seat, int] = {}
        total = StepSize(0)
        for seat in sorted(due, key=_turn_key):
            rows = _round_rows(seat)
            if rounds and total.rows + rows > self._max_step_tokens:
                break
            rounds[seat] = rows
            total += part_size(rows, seat.session.table.length)
        return rounds, total

    def _chunks(self, due: list[Seat], tokens: int, now: float) -> dict[Seat, int]:
        """Rows of each prompt's next chunk, `tokens` in all, in the order given."""
        chunks: dict[Seat, int] = {}
        # No younger session begins while an older one waits for room, or it would never find any.
        eldest_waiting: tuple[float, int] | None = None
        for seat in due:
            if tokens <= 0:
                break
            if not seat.running:
                if eldest_waiting is not None and seat.age_key > eldest_waiting:
                    continue
                if not self._seating.start(seat, now):
                    if seat.waits_for is None:
                        eldest_waiting = min(seat.age_key, eldest_waiting or seat.age_key)
                    continue
                if seat.answered is None:
                    self._seating.count_prompt(seat)
            # A preempted session may find all of its blocks again, and has its round at once.
            rows = min(_missing(seat), tokens, self._chunk_tokens) or _round_rows(seat)
            chunks[seat] = rows
            tokens -= rows
        return chunks

    def _seated(self, wanted: dict[Seat, int], now: float) -> tuple[Turn, ...]:
        """Those of them that get their blocks, the oldest first: only younger ones give way."""
        seated: dict[Seat, int] = {}
        for seat in sorted(wanted, key=_age_key) if len(wanted) > 1 else wanted:
            rows = wanted[seat]
            if not seat.running:
                continue  # It gave way just now.
            length = seat.session.table.length
            if not self._seating.reserve(seat, length + rows, now):
                rows = min(rows, self._seating.room(seat)) if _missing(seat) else 0
                if rows <= 0 or not self._seating.reserve(seat, length + rows, now):
                    continue
            seated[seat] = rows
        return tuple(self._turn(seat, seated[seat], now) for seat in wanted if seat in seated)

    def _turn(self, seat: Seat, rows: int, now: float) -> Turn:
        assert seat.job is not None
        seat.job.started()
        if _missing(seat):
            seat.turn_tokens += rows
            if seat.turn_tokens >= _TURN_TOKENS:
                seat.turn, seat.turn_tokens = now, 0
        else:
            seat.usual_rows = rows
        return Turn(seat, seat.job, seat.job.next_item(rows))


def _missing(seat: Seat) -> int:
    assert seat.job is not None
    return seat.job.missing


def _round_rows(seat: Seat) -> int:
    assert isinstance(seat.job, RoundJob)
    return seat.job.rows


def _turn_key(seat: Seat) -> tuple[float, int]:
    return seat.turn_key


def _age_key(seat: Seat) -> tuple[float, int]:
    return seat.age_key
