"""How long a step may take without making those wait who are being answered.

With A = gap + step, the usual time between two answers of an interactive session when nothing else
is computed, prompts and batch sessions get what keeps this time below twice A: a step without the
session's round may keep that waiting for a quarter of an A, and one with it ends 1.8 A after the
last answer. Where several prompts wait, those being answered give more, up to four A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from target_service.seat import Seat
from target_service.step_times import StepSize, StepTimes, part_size

_BETWEEN_ANSWERS = 1.8
_LATER_START = 0.25
# More of it for each further prompt that waits, and the most.
_FOR_EACH_PROMPT = 0.3
_MOST_BETWEEN_ANSWERS = 4.0
# Whatever came late, a prompt gets on by so much.
_LEAST = 0.25
# How far past its time a round is still waited for before a prompt takes the step.
_PATIENCE = 0.5
_LONGEST_PATIENCE_S = 0.05
# Prompt tokens that a step may have beside rounds.
_CHUNKS = (
    *(65536, 4096, 2048, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 56, 48, 40, 32),
    *(28, 24, 20, 16, 14, 12, 10, 8, 6, 4),
)
# Two steps of half the rounds each take much longer than one of all: waiting for rounds that are
# sure to come pays off up to a good part of the step.
_GATHERING = 0.35
_LONGEST_GATHERING_S = 0.010


@dataclass(frozen=True, slots=True)
class Limit:
    """What a step may take.

    Attributes:
        seconds: with everything in it.
        least: prompt tokens that it may have in any case.
        ask_again: when to ask again for a better one, on the same clock; None for never.
    """

    seconds: float = math.inf
    least: int = 0
    ask_again: float | None = None


@dataclass(frozen=True, slots=True)
class Gathering:
    """Wait until that time, or until so many more rounds have come."""

    until: float
    rounds: int


class Pacing:
    """Policy alone: it is told the time, the sessions being answered and what steps took."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def limit(self, rounds: StepSize, answered: Sequence[Seat], prompts: int, now: float) -> Limit:
        """For a step with these rounds; `answered` are the sessions that must not wait, `prompts`
        how many others do."""
        if not answered:
            return Limit()
        more = min(_FOR_EACH_PROMPT * max(0, prompts - 1), _MOST_BETWEEN_ANSWERS - _BETWEEN_ANSWERS)
        usual = rounds if rounds.rows else min(map(_usual_round, answered), key=_rows)
        step_s = self._times.predict(usual) or 0.0
        usual_s = step_s + max(0.0, min(seat.usual_gap_s for seat in answered))
        if rounds.rows:
            last = min((seat.answered or now for seat in answered if seat.job), default=now)
            left_s = last + (_BETWEEN_ANSWERS + more) * usual_s - now
            return Limit(max(left_s, step_s + _LEAST * usual_s), least=_CHUNKS[-1])
        expected = min(seat.expected() for seat in answered)
        patience_until = expected + min(_PATIENCE * usual_s, _LONGEST_PATIENCE_S)
        if now < patience_until:
            left_s = max(0.0, expected - now) + (_LATER_START + more) * usual_s
            return Limit(left_s if now < expected else 0.0, ask_again=patience_until)
        return Limit(_LEAST * usual_s, least=_CHUNKS[-1])

    def fits(self, step: StepSize, limit: Limit) -> bool:
        """Whether the step ends in time; before anything was measured, none does."""
        if limit.seconds == math.inf:
            return True
        expected_s = self._times.predict(step)
        return expected_s is not None and expected_s <= limit.seconds

    def chunk(self, step: StepSize, context: int, limit: Limit) -> int:
        """The most prompt tokens, `context` positions before them, that fit into the step too."""
        for chunk in _CHUNKS:
            if self.fits(step + part_size(chunk, context), limit):
                return chunk
        return limit.least

    def gathering(
        self, since: float, decoding: Sequence[Seat], rounds: StepSize, now: float
    ) -> Gathering | None:
        """Whether the step, which could have begun at `since`, should wait for rounds that come at
        any moment."""
        step_s = self._times.predict(rounds) or 0.0
        window_s = min(_GATHERING * step_s, _LONGEST_GATHERING_S)
        until = since + window_s
        if until <= now:
            return None
        coming = sum(
            seat.job is None and now < seat.expected() + 2 * seat.gap_spread_s < until
            for seat in decoding
        )
        return Gathering(until, coming) if coming else None


def _usual_round(seat: Seat) -> StepSize:
    return part_size(seat.usual_rows, seat.session.table.length)


def _rows(size: StepSize) -> int:
    return size.rows
