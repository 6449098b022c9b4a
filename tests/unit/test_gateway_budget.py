"""How long a draft is waited for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.budget import BudgetLimits, LatencyBudget

LIMITS = BudgetLimits(multiple=4.0, floor_s=0.05, ceiling_s=1.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_measured_waits_for_the_ceiling(clock: Clock) -> None:
    assert LatencyBudget(LIMITS, clock).seconds == 1.0


def test_a_quick_draft_brings_the_budget_down_to_the_floor_slowly(clock: Clock) -> None:
    budget = LatencyBudget(LIMITS, clock)
    budget.hit(0.002)
    assert budget.seconds > 0.9
    for _ in range(200):
        budget.hit(0.002)
    assert budget.seconds == pytest.approx(LIMITS.floor_s)


def test_the_budget_is_a_multiple_of_the_slowest_recent_answers(clock: Clock) -> None:
    budget = LatencyBudget(LIMITS, clock)
    for index in range(400):
        budget.hit(0.1 if index % 20 == 0 else 0.01)
    assert budget.seconds == pytest.approx(0.4)


def test_one_slow_moment_does_not_switch_drafting_off(clock: Clock) -> None:
    budget = LatencyBudget(LIMITS, clock)
    for _ in range(200):
        budget.hit(0.01)
    budget.missed()
    budget.missed()
    assert not budget.resting
    budget.hit(0.01)
    budget.missed()
    budget.missed()
    assert not budget.resting


def test_a_try_that_says_nothing_is_followed_by_another(clock: Clock) -> None:
    """A copy comes in time whatever a pass takes."""
    budget = LatencyBudget(LIMITS, clock)
    assert not budget.asked(), "nobody waits for the first ones"
    for _ in range(3):
        budget.missed()
    budget.undecided()
    assert budget.resting, "it was no try"
    assert not budget.trying
    while budget.resting:
        clock.now += 0.01
    before = budget.seconds
    for _ in range(5):
        assert budget.asked()
        assert budget.trying, "others wait for how it goes"
        assert not budget.asked(), "one tries at a time"
        budget.undecided()
        assert not budget.resting
    assert budget.asked()
    budget.missed()
    assert budget.resting, "the first pass is missed as well"
    assert not budget.trying
    assert budget.seconds >= before


def test_a_draft_that_keeps_missing_rests_longer_and_longer_and_comes_back(clock: Clock) -> None:
    budget = LatencyBudget(LIMITS, clock)
    for _ in range(3):
        budget.missed()
    rests = []
    for _ in range(8):
        start = clock.now
        while budget.resting:
            clock.now += 0.01
        rests.append(clock.now - start)
        budget.missed()
    assert rests[0] == pytest.approx(0.25, abs=0.02)
    assert rests == sorted(rests)
    assert rests[-1] <= 8.05
    clock.now += 10
    budget.hit(0.01)
    budget.missed()
    assert not budget.resting


def test_after_a_rest_one_proposal_tries_for_all(clock: Clock) -> None:
    budget = LatencyBudget(LIMITS, clock)
    for _ in range(3):
        budget.missed()
    clock.now += 1
    assert not budget.resting
    budget.asked()
    assert budget.resting, "the others do not wait for a draft that may be stuck"
    budget.hit(0.01)
    assert not budget.resting
    budget.asked()
    assert not budget.resting


def test_a_draft_that_became_slower_is_waited_for_longer(clock: Clock) -> None:
    budget = LatencyBudget(LIMITS, clock)
    for _ in range(200):
        budget.hit(0.002)
    before = budget.seconds
    for _ in range(3):
        budget.missed()
    assert budget.seconds > before
    for _ in range(3):
        budget.late(0.2)
    assert budget.seconds == pytest.approx(0.8)


@given(st.lists(st.one_of(st.floats(1e-6, 100), st.none()), max_size=300))
def test_the_budget_stays_within_its_bounds(latencies: list[float | None]) -> None:
    clock = Clock()
    budget = LatencyBudget(LIMITS, clock)
    for latency in latencies:
        if latency is None:
            budget.missed()
        else:
            budget.hit(latency)
        assert LIMITS.floor_s <= budget.seconds <= LIMITS.ceiling_s
