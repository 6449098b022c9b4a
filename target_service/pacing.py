"""How much of a prompt a step may compute without making those wait who are being answered.

With A = gap + step, the usual time between two answers of a session when nothing is prefilled, a
prompt's share is cut so that this time stays below twice A: a step without rounds may keep the next
round waiting for a quarter of an A, and a step with rounds ends 1.8 A after their last answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from target_service.seat import Seat
from target_service.step_times import StepSize, StepTimes, part_size

_BETWEEN_ANSWERS = 1.8
_LATER_START = 0.25
# Whatever came late, a prompt gets on by so much.
_LEAST = 0.25
# How far past its time a round is still waited for before a prompt takes the step.
_PATIENCE = 0.5
_LONGEST_PATIENCE_S = 0.05
# Prompt tokens that a step may have beside rounds.
_CHUNKS = (
    *(4096, 2048, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 56, 48, 40, 32),
    *(28, 24, 20, 16, 14, 12, 10, 8, 6, 4),
)
# Rounds are worth gathering for a small part of the step that they would share.
_GATHERING = 0.1
_LONGEST_GATHERING_S = 0.005


@dataclass(frozen=True, slots=True)
class Allowance:
    """Prompt tokens for the step now; where it is 0, when to ask again (on the same clock)."""

    tokens: int
    ask_again: float | None = None


class Pacing:
    """Policy alone: it is told the time, the sessions being answered and what steps took."""

    def __init__(self, times: StepTimes, max_step_tokens: int) -> None:
        self._times = times
        self._most = max_step_tokens

    def allowance(
        self, rounds: StepSize, decoding: Sequence[Seat], context: int, now: float
    ) -> Allowance:
        """For a step with these rounds in it.

        `decoding`: the sessions that must not wait; `context`: positions before the prompt's chunk.
        """
        room = max(0, self._most - rounds.rows)
        if not decoding:
            return Allowance(room)
        usual = rounds if rounds.rows else min(map(_usual_round, decoding), key=_rows)
        step_s = self._times.predict(usual) or 0.0
        usual_s = step_s + max(0.0, min(seat.usual_gap_s for seat in decoding))
        if rounds.rows:
            answered = min((seat.answered or now for seat in decoding if seat.job), default=now)
            limit_s = answered + _BETWEEN_ANSWERS * usual_s - now
            limit_s = max(limit_s, step_s + _LEAST * usual_s)
            return Allowance(min(room, self._chunk(rounds, context, limit_s) or _CHUNKS[-1]))
        expected = min(seat.expected() for seat in decoding)
        if now < expected:
            chunk = self._chunk(rounds, context, expected - now + _LATER_START * usual_s)
            if chunk:
                return Allowance(min(room, chunk))
        patience_until = expected + min(_PATIENCE * usual_s, _LONGEST_PATIENCE_S)
        if now < patience_until:
            return Allowance(0, ask_again=patience_until)
        chunk = self._chunk(rounds, context, _LEAST * usual_s)
        return Allowance(min(room, chunk or _CHUNKS[-1]))

    def gather_until(
        self, due: Sequence[Seat], decoding: Sequence[Seat], rounds: StepSize, now: float
    ) -> float | None:
        """Until when the step should wait for rounds that come at any moment; None for now."""
        step_s = self._times.predict(rounds) or 0.0
        window_s = min(_GATHERING * step_s, _LONGEST_GATHERING_S)
        until = min(seat.turn for seat in due) + window_s
        if until <= now:
            return None
        missing = (seat.expected() for seat in decoding if seat.job is None)
        return until if any(now - window_s < moment < until for moment in missing) else None

    def _chunk(self, rounds: StepSize, context: int, limit_s: float) -> int:
        """The most tokens that end within the limit together with the rounds; 0 for none."""
        for chunk in _CHUNKS:
            expected_s = self._times.predict(rounds + part_size(chunk, context))
            if expected_s is not None and expected_s <= limit_s:
                return chunk
        return 0


def _usual_round(seat: Seat) -> StepSize:
    return part_size(seat.usual_rows, seat.session.table.length)


def _rows(size: StepSize) -> int:
    return size.rows
