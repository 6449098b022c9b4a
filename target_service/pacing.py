"""How much of a prompt a step may compute without making those wait who are being answered.

With A = gap + step, the usual time between two answers of a session when nothing is prefilled, a
prompt's share is cut so that this time stays below about twice A: a step with rounds in it may take
half an A longer, and one without rounds may keep the next round waiting for a quarter of an A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from target_service.seat import Seat
from target_service.step_times import StepTimes

_LONGER_STEP = 0.5
_LATER_START = 0.25
# How far past its time a round is still waited for before a prompt takes the step.
_PATIENCE = 0.5
_LONGEST_PATIENCE_S = 0.05
# Prefill tokens that a step may have; a multiple of the kernels' favourite sizes.
_CHUNKS = (2048, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8)
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

    def allowance(self, round_rows: int, decoding: Sequence[Seat], now: float) -> Allowance:
        """For a step with `round_rows` rows of rounds; `decoding` are those that must not wait."""
        room = max(0, self._most - round_rows)
        if not decoding:
            return Allowance(room)
        rows = round_rows or min(seat.usual_rows for seat in decoding)
        step_s = self._times.predict(rows) or 0.0
        usual_s = step_s + max(0.0, min(seat.usual_gap_s for seat in decoding))
        if round_rows:
            limit_s = step_s + _LONGER_STEP * usual_s
            return Allowance(min(room, self._chunk(round_rows, limit_s) or _CHUNKS[-1]))
        expected = min(seat.expected() for seat in decoding)
        if now < expected:
            chunk = self._chunk(0, expected - now + _LATER_START * usual_s)
            if chunk:
                return Allowance(min(room, chunk))
        patience_until = expected + min(_PATIENCE * usual_s, _LONGEST_PATIENCE_S)
        if now < patience_until:
            return Allowance(0, ask_again=patience_until)
        return Allowance(min(room, self._chunk(0, _LONGER_STEP * usual_s) or _CHUNKS[-1]))

    def gather_until(
        self, rounds: Sequence[Seat], decoding: Sequence[Seat], round_rows: int, now: float
    ) -> float | None:
        """Until when the step should wait for rounds that are due at any moment; None for now."""
        step_s = self._times.predict(round_rows) or 0.0
        window_s = min(_GATHERING * step_s, _LONGEST_GATHERING_S)
        until = min(seat.turn for seat in rounds) + window_s
        if until <= now:
            return None
        due = any(
            seat.job is None and now - window_s < seat.expected() < until for seat in decoding
        )
        return until if due else None

    def _chunk(self, round_rows: int, limit_s: float) -> int:
        """The most tokens that end within the limit together with the rounds; 0 for none."""
        for chunk in _CHUNKS:
            expected_s = self._times.predict(round_rows + chunk)
            if expected_s is not None and expected_s <= limit_s:
                return chunk
        return 0
