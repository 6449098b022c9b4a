"""The block-length controller against worlds whose best answer is known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from gateway.controller import BlockController, PairModel
from gateway.request import Speculation, SpeculationMode

AUTO = Speculation(SpeculationMode.AUTO)


@dataclass
class World:
    """A pair whose slots are accepted with chance `chance`, and what its passes cost."""

    chance: float
    draft_s: float = 0.010
    verify_s: float = 0.040
    token_s: float = 0.001
    # Share of rounds whose drafts are copied from the text, which takes `copy_s`.
    copies: float = 0.0
    copy_s: float = 0.001
    noise: random.Random = field(default_factory=lambda: random.Random(1))
    tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)

    def round(self, controller: BlockController) -> None:
        length = controller.length()
        self.lengths.append(length)
        verify_s = (self.verify_s + self.token_s * length) * self.noise.uniform(0.95, 1.05)
        self.seconds += verify_s
        if length == 1:
            controller.observe_plain(verify_s)
            self.tokens += 1
            return
        copy = self.copies > 0 and self.noise.random() < self.copies
        propose_s = (self.copy_s if copy else self.draft_s) * self.noise.uniform(0.95, 1.05)
        self.seconds += propose_s
        accepted = 0
        while accepted < length - 1 and self.noise.random() < self.chance:
            accepted += 1
        copied = length - 1 if copy else 0
        controller.observe(length, length - 1, accepted, propose_s, verify_s, copied)
        self.tokens += accepted + 1

    def plain_rate(self) -> float:
        return 1 / (self.verify_s + self.token_s)

    def rate_of(self, length: int) -> float:
        expected = sum(self.chance**slot for slot in range(length))
        return expected / (self.draft_s + self.verify_s + self.token_s * length)


def run(world: World, rounds: int, speculation: Speculation = AUTO) -> World:
    controller = BlockController(PairModel(16), speculation, default_length=16)
    for _ in range(rounds):
        world.round(controller)
    return world


def test_drafts_that_are_never_right_cost_little() -> None:
    world = run(World(chance=0.0), 500)
    assert world.tokens / world.seconds > 0.93 * world.plain_rate()
    assert world.lengths.count(1) > 450


def test_copies_of_one_session_teach_others_nothing_of_the_drafter() -> None:
    """Neither that a pass costs nothing nor that it is always right."""
    alone, beside = PairModel(16), PairModel(16)
    for pair, copying in ((alone, False), (beside, True)):
        world, controller = World(chance=0.3), BlockController(pair, AUTO, default_length=16)
        looping, copier = World(1.0, copies=1.0), BlockController(pair, AUTO, 16)
        for _ in range(300):
            world.round(controller)
            if copying:
                looping.round(copier)
        assert looping.tokens == 0 or looping.tokens / looping.seconds > 5 * world.plain_rate()
    assert beside.draft.seconds(16) == pytest.approx(alone.draft.seconds(16), rel=0.1)
    assert beside.acceptance.chances[0] == pytest.approx(alone.acceptance.chances[0], abs=0.2)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2])
def test_bad_copies_are_no_slower_than_plain_steps(chance: float) -> None:
    """Also where no pass was seen yet, so that nobody knows what one takes."""
    world = run(World(chance, verify_s=0.010, token_s=0.0001, copy_s=0.0022, copies=1.0), 1500)
    assert world.tokens / world.seconds > 0.97 * world.plain_rate()


@pytest.mark.parametrize("chance", [0.4, 0.5])
def test_copies_are_not_taken_for_passes(chance: float) -> None:
    """One round in ten takes a pass, which would not pay for itself."""
    world = World(chance, draft_s=0.005, verify_s=0.010, token_s=0.0001, copies=0.9)
    run(world, 1500)
    assert world.tokens / world.seconds > 1.2 * world.plain_rate()


def test_drafting_is_tried_again_after_it_was_off() -> None:
    pair = PairModel(16)
    controller = BlockController(pair, AUTO, default_length=16)
    bad = World(chance=0.0)
    for _ in range(200):
        bad.round(controller)
    good = World(chance=0.95)
    for _ in range(400):
        good.round(controller)
    assert good.lengths[-100:].count(1) <= 3
    assert sum(good.lengths[-100:]) / 100 > 10


def test_good_drafts_are_used_at_full_length() -> None:
    world = run(World(chance=0.95), 300)
    assert world.tokens / world.seconds > 0.9 * world.rate_of(16)


@pytest.mark.parametrize("chance", [0.2, 0.4, 0.6, 0.8])
def test_the_chosen_length_is_near_the_best_one(chance: float) -> None:
    world = World(chance=chance, token_s=0.004)
    best = max(world.plain_rate(), *(world.rate_of(length) for length in range(2, 17)))
    run(world, 600)
    assert world.tokens / world.seconds > 0.88 * best


def test_a_second_session_starts_with_what_the_first_learned() -> None:
    pair = PairModel(16)
    first = World(chance=0.0)
    controller = BlockController(pair, AUTO, default_length=16)
    for _ in range(100):
        first.round(controller)
    second = World(chance=0.0)
    controller = BlockController(pair, AUTO, default_length=16)
    for _ in range(20):
        second.round(controller)
    assert second.lengths.count(1) >= 16


def test_fixed_never_changes_and_never_exceeds_the_replicas_limit() -> None:
    fixed = Speculation(SpeculationMode.FIXED, 6)
    assert set(run(World(chance=0.0), 100, fixed).lengths) == {6}
    longer = Speculation(SpeculationMode.FIXED, 99)
    assert set(run(World(chance=0.0), 10, longer).lengths) == {16}


def test_auto_stays_within_the_requested_length() -> None:
    world = run(World(chance=1.0), 200, Speculation(SpeculationMode.AUTO, 5))
    assert max(world.lengths) == 5
