"""What the engine's next step computes: policy alone, without threads and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from target_service.job import Job, RoundJob
from target_service.pacing import Limit, Pacing
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
    """A step, or how long to wait for more to do; None means until something happens.

    `wake_at`: sessions ready before it is worth planning again within that time.
    """

    turns: tuple[Turn, ...] = ()
    wait_s: float | None = None
    wake_at: int = 0


class Planner:
    """Rounds first, all that are there; then prompts, in turns, and batch sessions, as far as those
    who are being answered do not suffer.

    Guarded by the scheduler's lock; `now` is the scheduler's clock in seconds.

    Args:
        max_step_tokens: rows of a step.
        chunk_tokens: of them, of one prompt.

    Attributes:
        free_since: when the last step ended.
    """

    def __init__(
        self, seating: Seating, times: StepTimes, *, max_step_tokens: int, chunk_tokens: int
    ) -> None:
        self.free_since = 0.0
        self._seating = seating
        self._pacing = Pacing(times)
        self._max_step_tokens = max_step_tokens
        self._chunk_tokens = chunk_tokens

    def plan(self, ready: set[Seat], now: float) -> Plan:
        """The next step of the sessions in `ready`; no step is under way."""
        while ready:
            draft = self._draft(ready, now)
            seated = self._seated(draft.rows, now)
            if len(seated) == len(draft.rows):
                turns = tuple(_turn(seat, seated[seat], now) for seat in draft.rows)
                if turns:
                    return Plan(turns)
                return Plan(wait_s=draft.ask_again - now, wake_at=draft.wake_at)
            # What those who found no blocks would have had of the step is for others.
            ready = {seat for seat in ready if seat in seated or seat not in draft.rows}
        return Plan(wait_s=_LOOK_AGAIN_S)

    def _draft(self, ready: set[Seat], now: float) -> _Draft:
        """A step, whether or not there are blocks for it."""
        draft = _Draft(self._max_step_tokens)
        due, patient = _split((seat for seat in ready if _round_is_next(seat)), now)
        draft.add_rounds(due)
        # No prompt and nobody else to think of: the usual way of a lone session.
        if len(draft.rows) == len(self._seating.seats):
            return draft
        decoding = [seat for seat in self._seating.seats if seat.decoding(now)]
        if due or patient:
            since = max(self.free_since, min(seat.turn for seat in (*due, *patient)))
            gathering = self._pacing.gathering(since, decoding, draft.size, now)
            if gathering is not None:
                wake_at = len(ready) + gathering.rounds
                return _Draft(0, ask_again=gathering.until, wake_at=wake_at)
        answered = [seat for seat in decoding if not seat.session.batch]
        prompts, patient_prompts = _split((s for s in ready if not _round_is_next(s)), now)
        limit = self._pacing.limit(draft.size, answered, len(prompts), now)
        self._add_chunks(draft, prompts, limit, now)
        draft.add_rounds(patient, lambda size: self._pacing.fits(size, limit))
        self._add_chunks(draft, patient_prompts, replace(limit, least=0), now)
        draft.ask_again = now + _LOOK_AGAIN_S if limit.ask_again is None else limit.ask_again
        return draft

    def _add_chunks(self, draft: _Draft, prompts: list[Seat], limit: Limit, now: float) -> None:
        """Each prompt's next chunk, in their order, as far as limit and room go."""
        if not prompts:
            return
        context = prompts[0].session.table.length
        tokens = min(draft.room, self._pacing.chunk(draft.size, context, limit))
        for seat in prompts:
            if tokens <= 0:
                break
            if not seat.running and not self._start(draft, seat, now):
                continue
            # A preempted session may find all of its blocks again, and has its round at once.
            rows = min(_missing(seat), tokens, self._chunk_tokens) or _round_rows(seat)
            draft.add(seat, rows)
            tokens -= rows

    def _start(self, draft: _Draft, seat: Seat, now: float) -> bool:
        """Let a session begin, unless an older one waits for room: it would never find any."""
        if draft.eldest_waiting is not None and seat.age_key > draft.eldest_waiting:
            return False
        if not self._seating.start(seat, now):
            if seat.waits_for is None:
                draft.eldest_waiting = min(seat.age_key, draft.eldest_waiting or seat.age_key)
            return False
        return True

    def _seated(self, wanted: dict[Seat, int], now: float) -> dict[Seat, int]:
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
        return seated


class _Draft:
    """A step that is being put together: rows of each session, in order, and its size.

    Attributes:
        eldest_waiting: age of the oldest session that could not begin for want of blocks.
        ask_again, wake_at: when to plan again, should it stay empty; see Plan.
    """

    def __init__(self, max_rows: int, ask_again: float = 0.0, wake_at: int = 0) -> None:
        self.ask_again, self.wake_at = ask_again, wake_at
        self.rows: dict[Seat, int] = {}
        self.size = StepSize(0)
        self.eldest_waiting: tuple[float, int] | None = None
        self._max_rows = max_rows

    @property
    def room(self) -> int:
        return self._max_rows - self.size.rows

    def add(self, seat: Seat, rows: int) -> None:
        self.rows[seat] = rows
        self.size += part_size(rows, seat.session.table.length)

    def add_rounds(self, seats: list[Seat], fits: Callable[[StepSize], bool] | None = None) -> None:
        """Their rounds, in order, as many as fit; the first of a step always does."""
        for seat in seats:
            rows = _round_rows(seat)
            if self.rows and rows > self.room:
                break
            size = self.size + part_size(rows, seat.session.table.length)
            if fits is not None and not fits(size):
                break
            self.rows[seat] = rows
            self.size = size


def _split(seats: Iterable[Seat], now: float) -> tuple[list[Seat], list[Seat]]:
    """Those whose turn it is, and batch sessions that have not waited for long; in turn."""
    first: list[Seat] = []
    patient: list[Seat] = []
    for seat in sorted(seats, key=_turn_key):
        (patient if seat.turn_key[0] > now else first).append(seat)
    return first, patient


def _round_is_next(seat: Seat) -> bool:
    return seat.running and not _missing(seat)


def _turn(seat: Seat, rows: int, now: float) -> Turn:
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
