"""Which block length pays, from what is measured: never slower than plain decoding.

With p_j the chance that slot j's draft token is accepted once all before it were, a block of length
b commits E(b) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_(b-1) tokens on average. The length with the
best E(b) / (draft(b) + verify(b)) is used; b = 1 is a plain step, which costs no draft. draft(b) is
the mean of a pass of the drafter and of a copy from the text, by how many of the session's last
rounds each of them was.

What is measured can go out of date, so rounds that look unprofitable are tried now and then, the
more rarely the more often they turned out to be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.request import Speculation, SpeculationMode

# The last so many rounds count: for a session's own acceptance, that of the replica pair, and
# for times.
_SESSION_MEMORY = 10
_PAIR_MEMORY = 50
_TIME_MEMORY = 10
# Before anything is known: acceptance of a slot, and how much a token adds to a pass relative to
# its fixed cost (measured once on a CPU; only the first rounds rely on it).
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_SLOPE = 0.03
# Rounds with the full block before measurements are trusted.
_WARM_ROUNDS = 4
# A change of length must promise this much, or the noise of the clocks would make it.
_STICKINESS = 1.03
_FULL_PROBE_ROUNDS = 32
_PLAIN_PROBE_ROUNDS = 64
_FIRST_OFF_ROUNDS = 8
_MOST_OFF_ROUNDS = 128


@dataclass(slots=True)
class CostCurve:
    """Seconds of a pass by its number of tokens: running means, and a guess between them."""

    _seconds: dict[int, float] = field(default_factory=dict)

    def observe(self, tokens: int, seconds: float) -> None:
        known = self._seconds.get(tokens)
        if known is not None:
            seconds = known + (seconds - known) / _TIME_MEMORY
        self._seconds[tokens] = seconds

    def known(self, tokens: int) -> bool:
        return tokens in self._seconds

    def seconds(self, tokens: int) -> float:
        """The measured mean, or the nearest measured one scaled by the prior slope; 0 without."""
        if tokens in self._seconds or not self._seconds:
            return self._seconds.get(tokens, 0.0)
        nearest = min(self._seconds, key=lambda measured: abs(measured - tokens))
        ratio = (1 + _PRIOR_SLOPE * tokens) / (1 + _PRIOR_SLOPE * nearest)
        return self._seconds[nearest] * ratio


class Acceptance:
    """p_j of each slot: plain means at first, then means that forget."""

    def __init__(self, slots: int, memory: int) -> None:
        self.chances = [_PRIOR_ACCEPTANCE] * slots
        self._counts = [1] * slots
        self._memory = memory

    def copy(self, memory: int) -> Acceptance:
        """The same estimates, trusted as far as `memory` rounds can carry."""
        copied = Acceptance(0, memory)
        copied.chances = list(self.chances)
        copied._counts = [min(count, memory) for count in self._counts]
        return copied

    def observe(self, drafted: int, accepted: int) -> None:
        """Slots after the first rejected one tell nothing: they were never compared."""
        for slot in range(min(drafted, accepted + 1)):
            count = self._counts[slot] = min(self._counts[slot] + 1, self._memory)
            verdict = 1.0 if slot < accepted else 0.0
            self.chances[slot] += (verdict - self.chances[slot]) / count


class PairModel:
    """What all sessions on one target and one draft replica have learned together."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.acceptance = Acceptance(max_length - 1, _PAIR_MEMORY)
        self.draft = CostCurve()
        self.copies = CostCurve()
        self.verify = CostCurve()
        self.drafted_rounds = 0
        self.rounds_since_plain = 0

    def draft_seconds(self, length: int, passes: float) -> float:
        """Of a proposal, where this share of them takes a pass of the drafter."""
        copy = self.copies.seconds(length)
        # A pass that was never seen takes no less than a copy.
        return passes * max(self.draft.seconds(length), copy) + (1 - passes) * copy

    def best_length(self, chances: list[float], limit: int, current: int, passes: float) -> int:
        """The length up to `limit` with the best expected tokens a second.

        `current` stays unless another one is clearly better. `passes`: see `draft_seconds`.
        """
        best, best_rate, current_rate = 1, 1 / max(self.verify.seconds(1), 1e-9), 0.0
        if current == 1:
            current_rate = best_rate
        survives, expected = 1.0, 1.0
        for length in range(2, limit + 1):
            survives *= chances[length - 2]
            expected += survives
            cost = self.draft_seconds(length, passes) + self.verify.seconds(length)
            rate = expected / max(cost, 1e-9)
            if rate > best_rate:
                best, best_rate = length, rate
            if length == current:
                current_rate = rate
        return current if 0 < best_rate < current_rate * _STICKINESS else best


class BlockController:
    """Chooses the block length of each round of one session."""

    def __init__(self, pair: PairModel, speculation: Speculation, default_length: int) -> None:
        """
        Args:
            pair: shared by the sessions on the same replicas.
            speculation: the request's; OFF needs no controller.
            default_length: what the drafter was trained with.
        """
        self._pair = pair
        self._fixed = speculation.mode is SpeculationMode.FIXED
        self._full = min(speculation.block_length or default_length, pair.max_length)
        self._acceptance = pair.acceptance.copy(_SESSION_MEMORY)
        # Of this session's last drafted rounds, those that took a pass of the drafter.
        self._passes = 1.0
        self._drafted_rounds = 0
        self._length = self._full
        self._off_rounds_left = 0
        self._next_off_rounds = _FIRST_OFF_ROUNDS

    def length(self) -> int:
        """Anchor + draft tokens of the coming round; 1 is a plain step."""
        if self._fixed or self._pair.drafted_rounds < _WARM_ROUNDS:
            return self._full
        if self._off_rounds_left:
            self._off_rounds_left -= 1
            # The last of them is the probe that the next decision rests on.
            return 1 if self._off_rounds_left else self._full
        pair = self._pair
        if not pair.verify.known(1) or pair.rounds_since_plain >= _PLAIN_PROBE_ROUNDS:
            pair.rounds_since_plain = 0
            return 1
        if pair.drafted_rounds % _FULL_PROBE_ROUNDS == 0:
            return self._full
        self._length = pair.best_length(
            self._acceptance.chances, self._full, self._length, self._passes
        )
        if self._length > 1:
            self._next_off_rounds = _FIRST_OFF_ROUNDS
        else:
            self._off_rounds_left = self._next_off_rounds
            self._next_off_rounds = min(2 * self._next_off_rounds, _MOST_OFF_ROUNDS)
        return self._length

    def observe_plain(self, verify_s: float) -> None:
        """A plain step took so long."""
        self._pair.rounds_since_plain = 0
        self._pair.verify.observe(1, verify_s)

    def observe(
        self,
        length: int,
        drafted: int,
        accepted: int,
        propose_s: float,
        verify_s: float,
        copied: int = 0,
    ) -> None:
        """A block of `length` gave `drafted` tokens, of which the target accepted `accepted`.

        The last `copied` of them are from the text. What repeats itself is this session's affair:
        of the pair only the drafter's own tokens tell anything.
        """
        pair, own = self._pair, drafted - copied
        pair.drafted_rounds += 1
        pair.rounds_since_plain += 1
        (pair.draft if own else pair.copies).observe(length, propose_s)
        pair.verify.observe(drafted + 1, verify_s)
        self._acceptance.observe(drafted, accepted)
        pair.acceptance.observe(own, accepted)
        self._drafted_rounds += 1
        memory = min(self._drafted_rounds, _SESSION_MEMORY)
        self._passes += ((1.0 if own else 0.0) - self._passes) / memory
