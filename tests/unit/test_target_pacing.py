"""A long prompt beside running sessions: by a clock that moves as steps of the real target cost."""

from __future__ import annotations

import pytest

from target_service.job import Job
from target_service.pacing import Pacing
from target_service.seat import Seat
from target_service.session import Session
from target_service.step_times import StepSize, StepTimes, part_size
from tests.unit.ledger_engine import VOCABULARY, Simulation, session


class Client:
    """Sends its next round `gap_s` after each answer, and notes the time between answers."""

    def __init__(self, given: Session, gap_s: float, drafts: int) -> None:
        self.session, self.gap_s, self.drafts = given, gap_s, drafts
        self.job: Job | None = None
        self.next_round = 0.0
        self.last: float | None = None
        self.between: list[float] = []

    def attend(self, world: Simulation) -> None:
        if self.job is not None and self.job.future.done():
            if self.last is not None:
                self.between.append(world.now - self.last)
            self.job, self.last, self.next_round = None, world.now, world.now + self.gap_s
        if self.job is None and world.now >= self.next_round:
            late, world.now = world.now, self.next_round or world.now
            self.job = world.round(self.session, [VOCABULARY] * self.drafts)
            world.now = late


def world() -> Simulation:
    """About the default pair on two cores."""
    return Simulation(
        blocks=2000,
        size=16,
        max_step_tokens=512,
        chunk_tokens=256,
        step_s=0.010,
        row_s=0.0003,
        pair_s=0.5e-6,
    )


def live(
    simulation: Simulation, clients: list[Client], until: float, job: Job | None = None
) -> None:
    """Let clients and engine run until a time, or until the job is done."""
    while simulation.now < until and not (job is not None and job.future.done()):
        for client in clients:
            client.attend(simulation)
        if simulation.step() is None:
            wait_s = simulation.roster.plan(simulation.now).wait_s
            arrivals = [c.next_round - simulation.now for c in clients if c.job is None]
            simulation.now += max(1e-6, min([*arrivals, wait_s or 1.0]))


def start(simulation: Simulation, count: int, gap_s: float, drafts: int) -> list[Client]:
    clients = [Client(session([seed, 1, 2, 3], limit=8000), gap_s, drafts) for seed in range(count)]
    simulation.run(*[simulation.prefill(client.session) for client in clients])
    return clients


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


@pytest.mark.parametrize(
    ("count", "gap_s", "drafts"),
    [(1, 0.001, 0), (1, 0.004, 0), (1, 0.015, 15), (1, 0.050, 15), (4, 0.002, 0), (8, 0.015, 7)],
)
async def test_running_sessions_hardly_feel_a_long_prompt(
    count: int, gap_s: float, drafts: int
) -> None:
    simulation = world()
    clients = start(simulation, count, gap_s, drafts)
    live(simulation, clients, until=3.0)
    calm = p99([seconds for client in clients for seconds in client.between])
    for client in clients:
        client.between.clear()
    began = simulation.now
    long = simulation.prefill(session([seed % VOCABULARY for seed in range(4000)], limit=5000))
    live(simulation, clients, began + 60, long)
    assert long.future.done()
    busy = p99([seconds for client in clients for seconds in client.between])
    assert busy <= 2.05 * calm
    # Nor does the prompt stand still: nothing is left idle for it.
    assert simulation.now - began < 16.0


async def test_many_waiting_prompts_get_more_of_each_step_than_one() -> None:
    spent = {}
    for count in (1, 8):
        simulation = world()
        clients = start(simulation, 1, 0.002, 0)
        live(simulation, clients, until=2.0)
        calm = p99(clients[0].between)
        clients[0].between.clear()
        began, done = simulation.now, simulation.engine.prefilled
        for seed in range(count):
            simulation.prefill(session([seed, 7] * 1000, limit=3000, cache_key=bytes([seed])))
        live(simulation, clients, began + 2.0)
        assert p99(clients[0].between) <= (2.05 if count == 1 else 4.2) * calm
        spent[count] = simulation.engine.prefilled - done
    assert spent[8] > 1.5 * spent[1]


async def test_nobody_decodes_so_the_prompt_takes_large_chunks() -> None:
    simulation = world()
    simulation.run(simulation.prefill(session([1] * 1000, limit=2000)))
    assert [rows for (rows,) in simulation.engine.steps] == [256, 256, 256, 232]


async def test_a_session_that_went_silent_does_not_hold_prompts_back() -> None:
    simulation = world()
    start(simulation, 1, 0.001, 0)
    simulation.now += 1.0
    done = len(simulation.engine.steps)
    simulation.run(simulation.prefill(session([1] * 600, limit=2000)))
    assert [rows for (rows,) in simulation.engine.steps[done:]] == [256, 256, 88]


async def test_batch_sessions_do_not_hold_a_prompt_back() -> None:
    simulation = world()
    batch = session([1, 2, 3], limit=2000, batch=True)
    simulation.run(simulation.prefill(batch))
    simulation.run(simulation.round(batch))
    done = len(simulation.engine.steps)
    simulation.run(simulation.prefill(session([1] * 600, limit=2000)))
    assert [rows for (rows,) in simulation.engine.steps[done:]] == [256, 256, 88]


@pytest.mark.parametrize("gap_s", [0.001, 0.015])
async def test_batch_sessions_hardly_slow_an_interactive_one(gap_s: float) -> None:
    simulation = world()
    (interactive,) = start(simulation, 1, gap_s, 0)
    live(simulation, [interactive], until=3.0)
    calm = p99(interactive.between)
    interactive.between.clear()
    batch = [Client(session([s, 1, 2], limit=8000, batch=True), 0.002, 15) for s in range(32)]
    for client in batch:
        simulation.run(simulation.prefill(client.session))
    began = simulation.now
    live(simulation, [interactive, *batch], until=began + 10)
    assert p99(interactive.between) <= 2.05 * calm
    # And they get on: each waits for a few seconds at most.
    assert all(len(client.between) >= 3 for client in batch)


async def test_rounds_that_are_due_at_once_share_a_step() -> None:
    simulation = world()
    clients = start(simulation, 6, 0.004, 0)
    for index, client in enumerate(clients):
        client.gap_s += 0.0001 * index
    live(simulation, clients, until=2.0)
    done = len(simulation.engine.steps)
    live(simulation, clients, until=4.0)
    steps = simulation.engine.steps[done:]
    assert sum(map(len, steps)) / len(steps) > 5.5


async def test_a_lone_session_never_waits_for_others() -> None:
    simulation = world()
    clients = start(simulation, 1, 0.004, 0)
    live(simulation, clients, until=2.0)
    assert max(clients[0].between) < 0.004 + 0.010 + 0.0003 + 0.0001


def test_step_times_are_guessed_between_and_beyond_what_was_seen() -> None:
    times = StepTimes()
    assert times.predict(StepSize(1)) is None
    times.add(StepSize(16), 0.020)
    assert times.predict(StepSize(1)) == pytest.approx(0.020)
    assert times.predict(StepSize(64)) == pytest.approx(0.080)
    times.add(StepSize(64), 0.044)
    assert times.predict(StepSize(40)) == pytest.approx(0.032)
    assert times.predict(StepSize(112)) == pytest.approx(0.068)
    for _ in range(50):
        times.add(StepSize(16), 0.010)
    assert times.predict(StepSize(16)) == pytest.approx(0.010, rel=0.01)
    assert [(size.max_tokens, size.steps) for size in times.report()] == [(16, 51), (64, 1)]
    assert times.report()[0].p99_s == pytest.approx(0.020)


def test_long_contexts_do_not_make_short_ones_seem_slow() -> None:
    times = StepTimes()
    times.add(StepSize(1), 0.010)
    for context in range(0, 4000, 16):
        step = part_size(16, context)
        times.add(step, 0.0148 + 1e-6 * step.pairs)
    assert times.predict(part_size(16, 3000)) == pytest.approx(0.0148 + 0.048, rel=0.1)
    assert times.predict(part_size(16, 0)) == pytest.approx(0.0148, rel=0.25)


def test_before_anything_was_measured_a_chunk_beside_rounds_is_small() -> None:
    seat = Seat(session([1]), 1, 0.0, answered=0.0, running=True)
    pacing = Pacing(StepTimes())
    assert pacing.chunk(StepSize(1), 0, pacing.limit(StepSize(1), [seat], 1, now=0.0)) == 4
