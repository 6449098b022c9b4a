"""Who shares a step, who finds a prefix, and who gives way: by a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from target_service.session import Session
from tests.unit.ledger_engine import VOCABULARY, Recorder, Simulation, alone, session


def tokens(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCABULARY) for _ in range(length)]


def answer(simulation: Simulation, given: Session, count: int) -> list[int]:
    """Rounds, alone or beside others, until `count` tokens are answered."""
    while given.committed_length < given.prompt_length + count:
        simulation.run(simulation.round(given))
    return given.token_ids[given.prompt_length :]


async def test_rounds_and_prompts_of_many_sessions_share_a_step() -> None:
    simulation = Simulation()
    first, second = session(tokens(5)), session(tokens(6, 1))
    simulation.run(simulation.prefill(first), simulation.prefill(second))
    assert simulation.engine.steps == [[5, 6]]
    third = session(tokens(7, 2))
    jobs = [simulation.round(first, [1, 2]), simulation.round(second), simulation.prefill(third)]
    simulation.run(*jobs)
    assert sorted(simulation.engine.steps[1]) == [1, 3, 7]


async def test_a_step_has_no_more_rows_than_it_may() -> None:
    simulation = Simulation(max_step_tokens=20, chunk_tokens=16)
    for seed in range(3):
        simulation.prefill(session(tokens(30, seed)))
    simulation.step()
    simulation.step()
    assert simulation.engine.steps == [[16, 4], [14, 6]]


async def test_rounds_that_do_not_fit_come_first_in_the_next_step() -> None:
    simulation = Simulation(max_step_tokens=8)
    sessions = [session(tokens(4, seed)) for seed in range(5)]
    simulation.run(*[simulation.prefill(each) for each in sessions])
    done = len(simulation.engine.steps)
    jobs = [simulation.round(each, [1, 2]) for each in sessions]
    simulation.run(*jobs)
    assert simulation.engine.steps[done:] == [[3, 3], [3, 3], [3]]


async def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    simulation = Simulation(blocks=1000, max_step_tokens=64, chunk_tokens=64)
    long = simulation.prefill(session(tokens(3000), limit=4000))
    simulation.step()
    short = simulation.prefill(session(tokens(30, 1)))
    simulation.run(short)
    assert not long.future.done()
    assert len(simulation.engine.steps) <= 10
    simulation.run(long)


@pytest.mark.parametrize("batch_first", [True, False])
async def test_interactive_prompts_go_before_batch_ones(batch_first: bool) -> None:
    simulation = Simulation(max_step_tokens=16)
    batch = session(tokens(16), batch=True)
    interactive = session(tokens(16, 1))
    order = [batch, interactive] if batch_first else [interactive, batch]
    jobs = {each: simulation.prefill(each) for each in order}
    simulation.run(jobs[interactive])
    assert not jobs[batch].future.done()
    simulation.run(jobs[batch])


async def test_batch_prompts_are_not_starved_for_ever() -> None:
    simulation = Simulation(max_step_tokens=16)
    batch = simulation.prefill(session(tokens(16), batch=True))
    for seed in range(1, 1000):
        simulation.prefill(given := session(tokens(16, seed)))
        simulation.step()
        simulation.roster.leave(given)
        if batch.future.done():
            break
    assert simulation.now < 10


async def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    simulation = Simulation()
    prompt = tokens(21)
    first = session(prompt)
    simulation.run(simulation.prefill(first))
    simulation.roster.leave(first)
    second = session([*prompt[:14], *tokens(5, 1)])
    (outcome,) = simulation.run(simulation.prefill(second))
    assert outcome.cached_tokens == 12, "whole blocks of 4"
    assert simulation.engine.prefilled == 21 + 19 - 12
    assert answer(simulation, second, 10) == alone(second.token_ids[:19], 10)
    seating = simulation.roster.seating
    assert (seating.prompt_tokens, seating.cached_prompt_tokens) == (21 + 19, 12)


async def test_an_answer_is_found_by_the_prompt_that_goes_on_from_it() -> None:
    simulation = Simulation()
    first = session(tokens(9))
    simulation.run(simulation.prefill(first))
    answer(simulation, first, 12)
    simulation.roster.leave(first)
    (outcome,) = simulation.run(simulation.prefill(session([*first.token_ids, 1, 2])))
    assert outcome.cached_tokens == 20


async def test_a_salt_keeps_prefixes_apart() -> None:
    simulation = Simulation()
    for salt in (b"a", b"b", b"a"):
        given = session(tokens(20), cache_key=salt)
        (outcome,) = simulation.run(simulation.prefill(given))
    assert outcome.cached_tokens == 16
    assert simulation.engine.prefilled == 20 + 20 + 4


async def test_a_common_prefix_is_computed_once_by_all_who_come_together() -> None:
    simulation = Simulation(blocks=600, max_step_tokens=256, chunk_tokens=64)
    common = tokens(1000)
    sessions = [session([*common, *tokens(16, seed)], limit=1100) for seed in range(1, 17)]
    simulation.run(*[simulation.prefill(each) for each in sessions])
    assert simulation.engine.prefilled <= 0.1 * 16 * 1016
    for each in sessions:
        assert answer(simulation, each, 3)[:3] == alone(each.token_ids[:1016], 3)


@pytest.mark.parametrize("way", ["withdraw", "leave"])
async def test_another_computes_the_prefix_when_the_first_one_goes(way: str) -> None:
    simulation = Simulation(max_step_tokens=16)
    common = tokens(60)
    sessions = [session([*common, seed]) for seed in range(3)]
    jobs = [simulation.prefill(each) for each in sessions]
    simulation.step()
    if way == "withdraw":
        simulation.roster.withdraw(jobs[0])
    simulation.roster.leave(sessions[0])
    simulation.run(*jobs[1:])
    assert simulation.engine.prefilled == 61 + 1


async def test_features_that_the_draft_lacks_are_computed_though_their_blocks_are_there() -> None:
    simulation = Simulation()
    prompt = tokens(30)
    simulation.run(simulation.prefill(session(prompt)))
    for hit in (0, 10, 30):
        given, feed = session(prompt, draft_context_hit=hit), Recorder(base=hit)
        (outcome,) = simulation.run(simulation.prefill(given, feed))
        assert outcome.cached_tokens == min(hit // 4 * 4, 28)
        assert feed.token_ids == prompt[hit:]


async def test_when_blocks_run_out_the_youngest_gives_way_and_no_answer_changes() -> None:
    simulation = Simulation(blocks=12, size=4)
    sessions = [session(tokens(12, seed), limit=48) for seed in range(3)]
    feeds = [Recorder() for _ in sessions]
    simulation.run(*[simulation.prefill(s, f) for s, f in zip(sessions, feeds, strict=True)])
    order = []
    waiting = {s: simulation.round(s, feed=f) for s, f in zip(sessions, feeds, strict=True)}
    while waiting:
        simulation.run(next(iter(waiting.values())))
        for given, feed in zip(sessions, feeds, strict=True):
            if given in waiting and waiting[given].future.done():
                del waiting[given]
                if given.committed_length < 40:
                    waiting[given] = simulation.round(given, feed=feed)
                else:
                    order.append(given)
                    simulation.roster.leave(given)
    assert simulation.roster.seating.preemptions > 0
    assert order[0] is sessions[0], "the oldest is never held up"
    for given, feed in zip(sessions, feeds, strict=True):
        assert given.token_ids[12:40] == alone(given.token_ids[:12], 28)
        assert feed.token_ids == given.token_ids[: len(feed.token_ids)]
        assert len(feed.token_ids) == given.committed_length - 1
    assert simulation.pool.free_blocks == 12


async def test_a_session_that_is_idle_for_long_gives_its_blocks() -> None:
    simulation = Simulation(blocks=8, size=4)
    idle = session(tokens(24), limit=32)
    simulation.run(simulation.prefill(idle))
    busy = simulation.prefill(session(tokens(24, 1), limit=32))
    assert simulation.step() is None, "it may come back at any moment"
    simulation.run(busy, within_s=5)
    assert simulation.roster.seating.preemptions == 1
    (outcome,) = simulation.run(simulation.round(idle), within_s=5)
    assert list(outcome.committed) == alone(idle.token_ids[:24], 2)[1:]


async def test_a_batch_session_gives_way_to_an_interactive_one() -> None:
    simulation = Simulation(blocks=8, size=4)
    batch = session(tokens(20), limit=32, batch=True)
    simulation.run(simulation.prefill(batch))
    round_ = simulation.round(batch)
    simulation.run(simulation.prefill(session(tokens(24, 1), limit=28)), within_s=1)
    assert simulation.roster.seating.preemptions == 1
    assert not round_.future.done()


async def test_a_step_that_fails_costs_its_sessions_and_frees_their_blocks() -> None:
    simulation = Simulation()
    given, other = session(tokens(6)), session(tokens(7, 1))
    simulation.engine.fail_next = True
    job = simulation.prefill(given)
    simulation.step()
    with pytest.raises(Exception, match="it broke"):
        job.future.result()
    simulation.roster.leave(given)
    simulation.run(simulation.prefill(other))
    simulation.roster.leave(other)
    assert simulation.pool.free_blocks == 64
