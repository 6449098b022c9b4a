"""What ends a Decode stream: refusals, a close, a cancellation, deadlines and failures."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
import pytest
import torch

from flashduet.errors import InvalidRequest
from flashduet.rpc import Server, from_rpc_error, open_channel
from flashduet.v1 import target_pb2, target_pb2_grpc
from flashduet.v1.common_pb2 import SamplingParams
from target_service.server import TargetServicer
from tests.unit.target_server_support import WAIT_S, RunningTarget, slowed
from tests.unit.target_support import TinyTarget, prompt

pytest_plugins = ["tests.unit.target_fixtures"]


async def test_the_stream_s_end_is_a_close(running: RunningTarget) -> None:
    stream = running.decode()
    await stream.open(prompt(5))
    await stream.call.done_writing()
    assert await stream.call.code() is grpc.StatusCode.OK


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
