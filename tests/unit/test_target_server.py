"""The Decode stream over real gRPC, without a draft: answers, refusals, and ways out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from flashduet.errors import InvalidRequest
from flashduet.rpc import Server, from_rpc_error, open_channel
from flashduet.v1 import target_pb2, target_pb2_grpc
from flashduet.v1.common_pb2 import SamplingParams
from target_service.server import TargetServicer
from tests.unit.target_server_support import WAIT_S, RunningTarget, running_target, slowed
from tests.unit.target_support import TinyTarget, load_tiny, prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    torch.set_num_threads(1)
    return load_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
async def running(tiny: TinyTarget, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(tiny, tmp_path, max_sessions=3, max_kv_tokens=1000) as target:
        yield target
        await target.nothing_left()


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


async def test_the_stream_s_end_is_a_close(running: RunningTarget) -> None:
    stream = running.decode()
    await stream.open(prompt(5))
    await stream.call.done_writing()
    assert await stream.call.code() is grpc.StatusCode.OK


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


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "open.token_ids"),
        ({"token_ids": [5, 320]}, "open.token_ids[1]"),
        ({"token_ids": [5] * 512}, "open.token_ids"),
        ({"session_id": b"short"}, "open.session_id"),
        ({"draft_instance_id": b"short"}, "open.draft_instance_id"),
        ({"max_tokens": 0}, "open.max_tokens"),
        ({"prompt_length": 9}, "open.prompt_length"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "open.sampling.temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "open.sampling.top_p"),
        ({"sampling": SamplingParams(logit_bias={320: 1.0})}, "open.sampling.logit_bias"),
        ({"top_logprobs": 21}, "open.top_logprobs"),
        ({"draft_context_hit": 4}, "open.draft_context_hit"),
        ({"cache_salt": "s" * 1025}, "open.cache_salt"),
    ],
)
async def test_a_bad_open_names_its_field(running: RunningTarget, fields: dict, field: str) -> None:
    stream = running.decode()
    tokens = fields.pop("token_ids", [5, 6, 7])
    await stream.send_open(tokens, **fields)
    error = from_rpc_error(await stream.failure())
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize(
    ("drafts", "field"),
    [
        ([320], "verify.token_ids[0]"),
        ([5] * 32, "verify.token_ids"),
        ([5] * 8, "verify.token_ids"),
    ],
)
async def test_a_bad_verify_names_its_field(
    running: RunningTarget, drafts: list[int], field: str
) -> None:
    stream = running.decode()
    await stream.open(prompt(5), max_tokens=8)
    await stream.send_verify(drafts)
    error = from_rpc_error(await stream.failure())
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize("wrong", [{"base": 5}, {"base": 7}, {"round": 0}])
async def test_a_round_that_does_not_fit_is_refused(running: RunningTarget, wrong: dict) -> None:
    stream = running.decode()
    await stream.open(prompt(5))
    await stream.verify(round=1)
    await stream.send_verify(**{"round": 2} | wrong)
    assert (await stream.failure()).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_repeated_round_is_refused(running: RunningTarget) -> None:
    stream = running.decode()
    await stream.open(prompt(5))
    await stream.verify()
    await stream.send_verify(round=1)
    assert (await stream.failure()).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_open_comes_first_and_once(running: RunningTarget) -> None:
    stream = running.decode()
    await stream.send_verify([1], base=0)
    assert (await stream.failure()).code() is grpc.StatusCode.INVALID_ARGUMENT
    twice = running.decode()
    await twice.open(prompt(5))
    await twice.send_open(prompt(5))
    assert (await twice.failure()).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_same_session_cannot_be_open_twice(running: RunningTarget) -> None:
    session_id = os.urandom(16)
    first, second, reopened = running.decode(), running.decode(), running.decode()
    await first.open(prompt(5), session_id=session_id)
    await second.send_open(prompt(5), session_id=session_id)
    assert (await second.failure()).code() is grpc.StatusCode.FAILED_PRECONDITION
    await reopened.open(prompt(5), session_id=session_id, epoch=1)
    await first.verify()
    await first.close()
    await reopened.close()


async def test_too_many_sessions_are_told_when_to_retry(running: RunningTarget) -> None:
    streams = [running.decode() for _ in range(3)]
    for stream in streams:
        await stream.open(prompt(5))
    extra = running.decode()
    await extra.send_open(prompt(5))
    failure = await extra.failure()
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (from_rpc_error(failure).retry_after_s or 0) > 0
    assert "grpc-status-details-bin" in dict(failure.trailing_metadata())
    await streams[0].close()
    again = running.decode()
    await again.open(prompt(5))
    for stream in (again, *streams[1:]):
        await stream.close()


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


@pytest.mark.parametrize("phase", ["prefill", "verify", "idle"])
async def test_a_cancelled_client_frees_everything_and_no_more_steps_follow(
    running: RunningTarget, tiny: TinyTarget, phase: str
) -> None:
    stream = running.decode()
    if phase != "prefill":
        await stream.open(prompt(5))
    with slowed(tiny, 0.2):
        if phase == "prefill":
            await stream.send_open(prompt(400), max_tokens=8)
        elif phase == "verify":
            await stream.send_verify([1, 2])
        await running.opened(1)
        stream.call.cancel()
        await running.nothing_left()
        steps = (await running.load()).steps
        await asyncio.sleep(0.5)
        # The step under way ends; no other follows it.
        assert (await running.load()).steps <= steps + 1


async def test_the_session_s_deadline(running: RunningTarget, tiny: TinyTarget) -> None:
    stream = running.decode()
    with slowed(tiny, 0.1):
        await stream.send_open(prompt(400), max_tokens=8, deadline_ms=300)
        assert (await stream.failure()).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    idle = running.decode()
    await idle.open(prompt(5), deadline_ms=2000)
    assert (await idle.failure()).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_call_s_deadline(running: RunningTarget, tiny: TinyTarget) -> None:
    stream = running.decode(timeout=0.3)
    with slowed(tiny, 0.1):
        await stream.send_open(prompt(400), max_tokens=8)
        assert (await stream.failure()).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await running.nothing_left()


async def test_an_engine_failure_ends_one_session_only(
    running: RunningTarget, tiny: TinyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = running.decode(), running.decode()
    await broken.open(prompt(5))
    await sound.open(prompt(6))

    forward = tiny.engine.packed.forward

    def spoiled(*arguments: Any) -> torch.Tensor:
        return torch.full_like(forward(*arguments), torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine.packed, "forward", spoiled)
        await broken.send_verify([3])
        failure = await broken.failure()
    assert failure.code() is grpc.StatusCode.INTERNAL
    await sound.verify()
    await sound.close()


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


async def test_not_loaded_is_unavailable() -> None:
    server = Server(["flashduet.v1.TargetService"])
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(), server.grpc)
    await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(target_pb2.TargetServiceGetLoadRequest(), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)
