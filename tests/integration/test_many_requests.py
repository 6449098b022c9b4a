"""Many requests at once: each gets its own answer, its own drafts, and leaves nothing."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flashduet.client import AsyncClient
from flashduet.client.results import Generation
from flashduet.errors import Cancelled, DeadlineExceeded, Overloaded
from flashduet.sampling.params import Sampling
from tests.support.pair import PATIENCE, Pair

AT_ONCE = 24
LENGTH = 60
WAIT_S = 240


@pytest.fixture(scope="module")
def wide_pair(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A stack with room for all of them: what is tested is what load does to answers, not how long
    it takes."""
    running = Pair(
        tiny_models / "target",
        tiny_models / "drafter",
        tmp_path_factory.mktemp("traces"),
        FLASHDUET_TARGET_MAX_SESSIONS="32",
        **PATIENCE,
    )
    yield running
    running.stop()


@dataclass(frozen=True)
class Job:
    """One request, different from every other."""

    number: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        source = random.Random(self.number)
        return [source.randrange(4, 260) for _ in range(source.choice([1, 5, 40, 120]))]

    async def run(self, client: AsyncClient, **more: Any) -> Generation:
        options = {
            "max_tokens": LENGTH,
            "sampling": Sampling(temperature=4.0, seed=self.number),
            "ignore_eos": True,
            "speculation": "fixed",
            "block_length": 4,
            "timeout": WAIT_S,
            **self.options,
            **more,
        }
        return await client.generate(self.prompt, **options).result()


def together(pair: Pair, jobs: list[Job]) -> list[Generation]:
    async def run() -> list[Generation]:
        async with AsyncClient(pair.gateway) as client, asyncio.timeout(WAIT_S):
            return await asyncio.gather(*(job.run(client) for job in jobs))

    return asyncio.run(run())


def one_by_one(pair: Pair, jobs: list[Job]) -> list[Generation]:
    async def run() -> list[Generation]:
        async with AsyncClient(pair.gateway) as client, asyncio.timeout(WAIT_S):
            return [await job.run(client) for job in jobs]

    return asyncio.run(run())


def test_under_load_each_session_gets_the_tokens_and_the_acceptance_it_gets_alone(wide_pair):
    """llama.cpp 27117: acceptance collapsed at 16 parallel slots, in silence."""
    jobs = [Job(number) for number in range(AT_ONCE)]
    alone = one_by_one(wide_pair, jobs)
    loaded = together(wide_pair, jobs)
    for one, other in zip(alone, loaded, strict=True):
        assert other.token_ids == one.token_ids
        assert other.text == one.text
        assert set(other.speculation.undrafted_rounds) <= {"last_token"}
        assert other.speculation.acceptance_length == one.speculation.acceptance_length
        assert other.speculation.accepted_tokens == one.speculation.accepted_tokens
    assert sum(run.speculation.accepted_tokens for run in loaded) > AT_ONCE
    wide_pair.assert_nothing_left()


def test_requests_of_all_kinds_do_not_touch_each_other(wide_pair):
    """Drafted, undrafted, stopped, cancelled and timed-out requests side by side."""
    whole = one_by_one(
        wide_pair, [Job(number, {"speculation": "off"}) for number in range(AT_ONCE)]
    )

    async def cancelled(client: AsyncClient, job: Job) -> str:
        stream = client.generate(job.prompt, max_tokens=300, ignore_eos=True)
        async with stream:
            async for _ in stream:
                break
        with contextlib.suppress(Cancelled):
            await stream.result()
        return "cancelled"

    async def late(client: AsyncClient, job: Job) -> str:
        with pytest.raises(DeadlineExceeded):
            await job.run(client, max_tokens=300, timeout=0.3)
        return "late"

    async def stopped(client: AsyncClient, job: Job) -> str:
        truth = whole[job.number]
        stop = truth.token_ids[20]
        run = await job.run(client, stop_token_ids=[stop])
        assert run.token_ids == truth.token_ids[: truth.token_ids.index(stop) + 1]
        return "stopped"

    async def stop_string(client: AsyncClient, job: Job) -> str:
        truth = whole[job.number]
        stop = truth.text[len(truth.text) // 2 :][:3]
        run = await job.run(client, stop=[stop])
        assert run.text == truth.text[: truth.text.index(stop)]
        assert run.stop_string == stop
        return "stop string"

    async def same(client: AsyncClient, job: Job, mode: str) -> str:
        run = await job.run(client, speculation=mode)
        assert run.token_ids == whole[job.number].token_ids
        return mode

    async def run() -> Counter[str]:
        async with AsyncClient(wide_pair.gateway) as client, asyncio.timeout(WAIT_S):
            kinds = [
                lambda job: same(client, job, "fixed"),
                lambda job: same(client, job, "off"),
                lambda job: same(client, job, "auto"),
                lambda job: stopped(client, job),
                lambda job: stop_string(client, job),
                lambda job: cancelled(client, job),
                lambda job: late(client, job),
            ]
            work = [kinds[n % len(kinds)](Job(n)) for n in range(AT_ONCE)]
            return Counter(await asyncio.gather(*work))

    assert len(asyncio.run(run())) == 7
    wide_pair.assert_nothing_left()


def test_hundreds_of_cancels_at_random_moments_leave_nothing(wide_pair):
    """llm-d 1138: a cancel in the wrong window stranded KV until a timeout."""
    one_by_one(wide_pair, [Job(0)])
    wide_pair.assert_nothing_left()
    before = wide_pair.descriptors()
    source = random.Random(7)

    async def cancel_once(client: AsyncClient, number: int) -> None:
        stream = client.generate(
            Job(number).prompt,
            max_tokens=200,
            ignore_eos=True,
            temperature=4.0,
            speculation=source.choice(["fixed", "off", "auto"]),
        )
        asyncio.get_running_loop().call_later(source.expovariate(8), stream.cancel)
        with contextlib.suppress(Cancelled, Overloaded):
            await stream.result()

    async def run() -> None:
        async with AsyncClient(wide_pair.gateway) as client, asyncio.timeout(WAIT_S):
            numbers = iter(range(400))

            async def worker() -> None:
                for number in numbers:
                    await cancel_once(client, number)

            await asyncio.gather(*(worker() for _ in range(12)))

    asyncio.run(run())
    wide_pair.assert_nothing_left(within_s=5)
    wide_pair.assert_closed(before, more=2)
    (run_after,) = one_by_one(wide_pair, [Job(3)])
    assert run_after.speculation.drafted_tokens > 0


def test_more_sessions_than_there_is_room_for_are_told_to_come_back(pair):
    """The target has 16 sessions; those that are refused change nothing for the others."""
    jobs = [Job(number) for number in range(AT_ONCE)]
    truth = one_by_one(pair, jobs)

    async def run() -> list[Generation | BaseException]:
        async with AsyncClient(pair.gateway) as client, asyncio.timeout(WAIT_S):
            work = [job.run(client, max_tokens=LENGTH) for job in jobs]
            return await asyncio.gather(*work, return_exceptions=True)

    served = 0
    for one, expected in zip(asyncio.run(run()), truth, strict=True):
        if isinstance(one, Overloaded):
            assert one.retry_after_s
            continue
        assert isinstance(one, Generation), one
        assert one.token_ids == expected.token_ids
        served += 1
    assert served >= 16
    pair.assert_nothing_left()
