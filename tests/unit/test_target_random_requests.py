"""2,000 random requests over a tiny pool: no answer changes, nothing is left, nothing stands still.

Priorities, shared prefixes, salts, drafts right and wrong, drafted feeds, cancels at every moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from target_service.job import Job
from target_service.session import Session
from tests.unit.ledger_engine import VOCABULARY, Recorder, Simulation, alone, next_token, session

REQUESTS = 2000
# What one session may take at most: all of the pool.
BLOCKS, SIZE = 24, 4


@dataclass
class Request:
    session: Session
    prompt: list[int]
    answer: int
    feed: Recorder | None
    job: Job
    # Steps after which the client goes; None for one that stays.
    patience: int | None


class Clients:
    """Up to 12 requests at a time, until all have been made."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.simulation = Simulation(
            blocks=BLOCKS, size=SIZE, max_step_tokens=24, chunk_tokens=self.random.choice([5, 16])
        )
        self.made = self.finished = self.cancelled = 0
        self.open: list[Request] = []
        common = [self.random.randrange(VOCABULARY) for _ in range(40)]
        self.prefixes = [common[:length] for length in (0, 7, 16, 40)]

    def run(self) -> None:
        while self.made < REQUESTS or self.open:
            while self.made < REQUESTS and len(self.open) < 12 and self.random.random() < 0.7:
                self.open.append(self.arrive())
            self.advance()
            for request in list(self.open):
                self.attend(request)

    def advance(self) -> None:
        simulation = self.simulation
        if simulation.step() is None:
            wait_s = simulation.roster.plan(simulation.now).wait_s
            ready = bool(simulation.roster.ready)
            assert not ready or (wait_s is not None and wait_s > 0)
            simulation.now += wait_s if wait_s is not None else 0.01
        assert simulation.now < 100_000, "no progress"

    def arrive(self) -> Request:
        pick = self.random
        tail = [pick.randrange(VOCABULARY) for _ in range(pick.randrange(1, 20))]
        prompt = [*pick.choice(self.prefixes), *tail]
        given = session(
            prompt,
            limit=BLOCKS * SIZE,
            batch=pick.random() < 0.3,
            cache_key=pick.choice([b"", b"", b"salt"]),
        )
        feed = None
        if pick.random() < 0.5:
            given.draft_context_hit = pick.choice([0, len(prompt) // 2, len(prompt)])
            feed = Recorder(base=given.draft_context_hit)
        self.made += 1
        return Request(
            session=given,
            prompt=prompt,
            answer=pick.randrange(1, 30),
            feed=feed,
            job=self.simulation.prefill(given, feed),
            patience=pick.randrange(30) if pick.random() < 0.3 else None,
        )

    def attend(self, request: Request) -> None:
        simulation, given = self.simulation, request.session
        if request.patience is not None:
            request.patience -= 1
            if request.patience < 0:
                simulation.roster.withdraw(request.job)
                simulation.roster.leave(given)
                self.open.remove(request)
                self.cancelled += 1
                return
        if not request.job.future.done():
            return
        request.job.future.result()
        answered = given.committed_length - len(request.prompt)
        if answered < request.answer:
            if self.random.random() < 0.8:  # Else it thinks a moment longer.
                request.job = simulation.round(given, self.drafts(given), request.feed)
            return
        assert given.token_ids[len(request.prompt) :] == alone(request.prompt, answered)
        if request.feed is not None:
            sent = given.token_ids[request.feed.base : given.committed_length - 1]
            assert request.feed.token_ids == sent
        simulation.roster.leave(given)
        self.open.remove(request)
        self.finished += 1

    def drafts(self, given: Session) -> list[int]:
        """Some right, and a wrong one after them."""
        tokens, room = list(given.token_ids), given.token_limit - given.committed_length
        for _ in range(min(self.random.randrange(4), room)):
            tokens.append(next_token(tokens))
        wrong = (
            [VOCABULARY] if self.random.random() < 0.5 and len(tokens) < given.token_limit else []
        )
        return [*tokens[given.committed_length :], *wrong]


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_requests_over_a_tiny_pool(seed: int) -> None:
    clients = Clients(seed)
    clients.run()
    assert clients.finished + clients.cancelled == REQUESTS
    assert clients.cancelled > 100
    seating = clients.simulation.roster.seating
    assert seating.preemptions > 100, "the pool is small enough to run out"
    assert seating.cached_prompt_tokens > 1000
    assert (len(seating.seats), len(clients.simulation.roster.ready)) == (0, 0)
    assert clients.simulation.pool.free_blocks == BLOCKS
