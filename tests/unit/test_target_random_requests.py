"""Random requests over a tiny pool: no answer changes, nothing is left, nothing stands still.

Priorities, shared prefixes, salts, drafts right and wrong, drafted feeds, cancels at every moment;
2,000 of them over an engine that knows which tokens its blocks hold, and some over a real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from target_service.job import Job
from target_service.session import Session
from tests.unit.ledger_engine import VOCABULARY, Recorder, Simulation, alone, session
from tests.unit.target_support import load_tiny
from tests.unit.target_support import prompt as tokens

# Above both vocabularies' tokens that are ever chosen here.
WRONG = 319

# One session may take all of the pool.
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
    """Up to 12 requests at a time, until all have been made.

    Args:
        truth: the answer to a prompt, so many tokens of it.
        prompts: makes the next one.
    """

    def __init__(
        self,
        simulation: Simulation,
        requests: int,
        prompts: Callable[[random.Random], list[int]],
        truth: Callable[[list[int], int], list[int]],
        seed: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.simulation, self.requests = simulation, requests
        self.prompts, self.truth = prompts, truth
        self.made = self.finished = self.cancelled = 0
        self.open: list[Request] = []
        pool = simulation.pool
        self.limit = pool.num_blocks * pool.block_tokens

    def run(self) -> None:
        while self.made < self.requests or self.open:
            while self.made < self.requests and len(self.open) < 12 and self.random.random() < 0.7:
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
        assert simulation.now < 1000, "no progress"

    def arrive(self) -> Request:
        pick = self.random
        prompt = self.prompts(pick)
        given = session(
            prompt,
            limit=self.limit,
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
                drafts = self.drafts(request)
                request.job = simulation.round(given, drafts, request.feed)
            return
        assert given.token_ids[len(request.prompt) :] == self.truth(request.prompt, answered)
        if request.feed is not None:
            sent = given.token_ids[request.feed.base : given.committed_length - 1]
            assert request.feed.token_ids == sent
        simulation.roster.leave(given)
        self.open.remove(request)
        self.finished += 1

    def drafts(self, request: Request) -> list[int]:
        """Some right, and a wrong one after them."""
        given = request.session
        answered = given.committed_length - len(request.prompt)
        room = given.token_limit - given.committed_length
        count = min(self.random.randrange(4), room)
        drafts = self.truth(request.prompt, answered + count)[answered:]
        if self.random.random() < 0.5 and count < room:
            drafts.append(WRONG)
        return drafts

    def assert_nothing_is_left(self) -> None:
        assert self.finished + self.cancelled == self.requests
        assert self.cancelled > self.requests / 20
        seating = self.simulation.roster.seating
        assert seating.preemptions > self.requests / 20, "the pool is small enough to run out"
        assert seating.cached_prompt_tokens > self.requests
        assert (len(seating.seats), len(self.simulation.roster.ready)) == (0, 0)
        assert self.simulation.pool.free_blocks == self.simulation.pool.num_blocks


async def test_2000_random_requests_over_a_tiny_pool() -> None:
    common = [random.Random(2).randrange(VOCABULARY) for _ in range(40)]

    def prompt(pick: random.Random) -> list[int]:
        tail = [pick.randrange(VOCABULARY) for _ in range(pick.randrange(1, 20))]
        return [*common[: pick.choice([0, 7, 16, 40])], *tail]

    simulation = Simulation(blocks=BLOCKS, size=SIZE, max_step_tokens=24, chunk_tokens=16)
    clients = Clients(simulation, 2000, prompt, alone)
    clients.run()
    clients.assert_nothing_is_left()


async def test_random_requests_to_a_real_target_over_a_tiny_pool(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tiny = load_tiny(tmp_path / "llama")
    common, tails = tokens(80), range(12)
    prompts = [[*common[: (0, 16, 40, 80)[seed % 4]], *tokens(5 + seed, seed)] for seed in tails]
    answers = {tuple(given): tiny.generate(given, 40) for given in prompts}
    size = tiny.engine.kv.block_tokens
    simulation = Simulation(blocks=11, size=size, max_step_tokens=48, engine=tiny.engine)
    clients = Clients(
        simulation,
        100,
        prompts=lambda pick: list(pick.choice(prompts)),
        truth=lambda given, count: answers[tuple(given)][:count],
    )
    clients.run()
    clients.assert_nothing_is_left()
