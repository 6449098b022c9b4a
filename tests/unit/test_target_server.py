"""The Decode stream over real gRPC, without a draft: what it answers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from flashduet.v1.common_pb2 import SamplingParams
from tests.unit.target_server_support import RunningTarget, slowed
from tests.unit.target_support import TinyTarget, prompt

pytest_plugins = ["tests.unit.target_fixtures"]


async def test_rounds_give_what_generate_gives(running: RunningTarget, tiny: TinyTarget) -> None:
    # Twice: nothing of the first request may be left in the second.
    for seed in (0, 1):
        tokens = prompt(40, seed)
        truth = tiny.generate(tokens, 30)
        stream = running.decode()
        opened = await stream.open(tokens)
        assert (opened.prefill_chunks, opened.drafting, opened.cached_tokens) == (3, False, 0)
        assert opened.timings.forward_us > 0
        assert (await running.load()).sessions == 1
        plain = await stream.verify()
        assert plain.accepted == 0
        partial = await stream.verify([truth[2], truth[3], (truth[4] + 1) % 320, truth[5]])
        assert (partial.accepted, partial.drafting) == (2, False)
        whole = await stream.verify(truth[5:12])
        assert whole.accepted == 7
        while len(stream.tokens) < 70:
            await stream.verify()
        assert stream.tokens[40:] == truth
        await stream.close()


async def test_steps_taken_together_give_what_they_give_one_by_one(
    running: RunningTarget, tiny: TinyTarget
) -> None:
    tokens = prompt(20)
    truth = tiny.generate(tokens, 30)
    stop = next(token for token in truth[14:] if token not in truth[:14])
    stream = running.decode()
    await stream.open(tokens, max_tokens=30, stop_token_ids=[stop], top_logprobs=0)
    with slowed(tiny, 0.02):
        many = await stream.verify(truth[1:3], more_steps=5)
    assert (many.accepted, list(many.more_token_ids)) == (2, truth[4:9])
    assert [entry.chosen.token_id for entry in many.logprobs] == truth[1:9]
    assert many.timings.forward_us >= 6 * 20_000, "it is that of all six steps"
    await stream.verify()
    cut = await stream.verify(more_steps=19)
    assert cut.more_token_ids[-1] == stop
    assert stream.tokens == [*tokens, *truth[: truth.index(stop) + 1]]
    await stream.send_verify(more_steps=30)
    assert "more_steps" in (await stream.failure()).details()


async def test_steps_can_be_answered_as_they_are_made(
    running: RunningTarget, tiny: TinyTarget
) -> None:
    tokens = prompt(20)
    truth = tiny.generate(tokens, 30)
    stop = next(token for token in truth[20:] if token not in truth[:20])
    stream = running.decode()
    await stream.open(tokens, max_tokens=30, stop_token_ids=[stop], top_logprobs=0)
    first = await stream.verify(truth[1:3], more_steps=5, one_by_one=True)
    steps = [await stream.next_step() for _ in range(5)]
    assert (first.accepted, [step.accepted for step in steps]) == (2, [0] * 5)
    assert stream.tokens == [*tokens, *truth[:9]]
    assert all(len(step.logprobs) == 1 and step.timings.forward_us > 0 for step in steps)
    # What comes then is asked for as ever; a stop id ends the steps.
    await stream.verify()
    await stream.verify(more_steps=18, one_by_one=True)
    while stream.tokens[-1] != stop:
        await stream.next_step()
    await stream.verify()
    assert stream.tokens == [*tokens, *truth[: truth.index(stop) + 2]]
    await stream.close()


async def test_a_close_ends_the_steps_that_are_to_come(
    running: RunningTarget, tiny: TinyTarget
) -> None:
    with slowed(tiny, 0.1):
        stream = running.decode()
        await stream.open(prompt(5))
        await stream.verify(more_steps=90, one_by_one=True)
        await stream.close(steps_to_come=True)
        await running.nothing_left()
        assert (await running.load()).steps < 90
        # So does the stream's end.
        cut = running.decode()
        await cut.open(prompt(6))
        await cut.verify(more_steps=90, one_by_one=True)
        cut.call.cancel()
        await running.nothing_left()


async def test_no_round_may_be_asked_for_while_steps_are_to_come(
    running: RunningTarget, tiny: TinyTarget
) -> None:
    with slowed(tiny, 0.1):
        stream = running.decode()
        await stream.open(prompt(5))
        await stream.verify(more_steps=90, one_by_one=True)
        await stream.send_verify(round=99)
        failure = await stream.failure(steps_to_come=True)
        assert failure.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "steps are to come" in (failure.details() or "")


async def test_sampling_travels_with_open(running: RunningTarget) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    answers = []
    for fields in ({}, {}, {"choice": 1}):
        stream = running.decode()
        await stream.open(prompt(9), sampling=sampling, **fields)
        for _ in range(8):
            await stream.verify()
        answers.append(stream.tokens)
        await stream.close()
    assert answers[0] == answers[1] != answers[2]


async def test_blocks_are_taken_as_they_fill(running: RunningTarget) -> None:
    """Three sessions that may fill 1,200 of 1,000 tokens are all served."""
    streams = [running.decode() for _ in range(3)]
    for seed, stream in enumerate(streams):
        await stream.open(prompt(100, seed), max_tokens=300)
    load = await running.load()
    assert load.kv_tokens == 3 * 112
    assert load.free_kv_blocks == load.kv_blocks - 3 * 7
    assert load.kv_block_tokens == 16
    for stream in streams:
        await stream.close()
    load = await running.load()
    assert load.free_kv_blocks == load.kv_blocks
    assert load.cached_kv_blocks == 3 * 6, "whole blocks stay findable"


async def test_a_prompt_that_comes_again_is_mostly_found(
    running: RunningTarget, tiny: TinyTarget
) -> None:
    tokens = prompt(90)
    truth = tiny.generate(tokens, 20)
    for salt, cached in [("", 0), ("", 80), ("mine", 0)]:
        stream = running.decode()
        opened = await stream.open(tokens, cache_salt=salt)
        assert opened.cached_tokens == cached
        while len(stream.tokens) < 110:
            await stream.verify()
        assert stream.tokens[90:110] == truth
        await stream.close()
    load = await running.load()
    assert (load.prompt_tokens, load.cached_prompt_tokens) == (270, 80)


async def test_step_times_are_told_by_size(running: RunningTarget) -> None:
    stream = running.decode()
    await stream.open(prompt(40))
    await stream.verify([1, 2, 3])
    await stream.close()
    times = (await running.load()).step_times
    # Chunks of 16, 16 and 8, and a round of 4 rows.
    assert {size.max_tokens: size.steps for size in times} == {4: 1, 8: 1, 16: 2}
    assert all(0 < size.mean_us <= size.p99_us for size in times)


async def test_logprobs_are_of_the_model_s_own_distribution(
    running: RunningTarget, tiny: TinyTarget
) -> None:
    tokens = prompt(12)
    stream = running.decode()
    opened = await stream.open(tokens, top_logprobs=3, sampling=SamplingParams(temperature=0.5))
    told = [opened.first_logprobs]
    told += (await stream.verify()).logprobs
    told += (await stream.verify([1, 2])).logprobs
    rows = tiny.reference(stream.tokens).logits[0].log_softmax(-1)
    for position, logprobs in enumerate(told, 12):
        assert logprobs.chosen.token_id == stream.tokens[position]
        row = rows[position - 1]
        assert logprobs.chosen.logprob == pytest.approx(
            float(row[stream.tokens[position]]), abs=1e-3
        )
        assert [top.token_id for top in logprobs.top] == row.topk(3).indices.tolist()
    assert len(told) == len(stream.tokens) - 12
    plain = running.decode()
    assert not (await plain.open(tokens)).HasField("first_logprobs")
    await plain.close()
    await stream.close()


async def test_long_prompts_let_rounds_through(running: RunningTarget, tiny: TinyTarget) -> None:
    quick, long = running.decode(), running.decode()
    await quick.open(prompt(5))
    with slowed(tiny, 0.1):
        await long.send_open(prompt(320), max_tokens=8)
        opened = asyncio.create_task(long._read())
        await running.opened(2)
        for _ in range(3):
            await quick.verify()
        assert not opened.done(), "a round waits for one of its chunks at most"
        assert (await opened).opened.prefill_chunks >= 20
    await quick.close()
    await long.close()
