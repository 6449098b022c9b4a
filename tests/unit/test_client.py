"""Both clients against a gateway that is real gRPC and answers from a script."""

import asyncio
import threading

import pytest

from flashduet import errors
from flashduet.client import (
    AsyncClient,
    Client,
    Generation,
    Message,
    PositionLogprobs,
    TokenLogprob,
)
from flashduet.client.collector import Collector
from flashduet.client.request import build_request
from flashduet.healthcheck import Health, probe
from flashduet.rpc import Server
from flashduet.sampling.params import Sampling
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.common_pb2 import PRIORITY_BATCH
from tests.support.scripted_gateway import scripted_gateway

WAIT_S = 60


@pytest.fixture
def gateway():
    with scripted_gateway() as (endpoint, servicer):
        yield endpoint, servicer


def assert_whole(generation: Generation) -> None:
    assert generation.text == "héllo"
    assert generation.token_ids == [4, 5, 6, 7]
    assert generation.finish_reason == "stop"
    assert generation.usage.completion_tokens == 4
    assert generation.usage.cached_tokens == 1
    assert generation.speculation.acceptance_length == 1.5
    assert generation.speculation.phases == {"prefill": 0.5, "verify.forward": 0.25}
    assert generation.speculation.undrafted_rounds == {"CONTEXT_LATE": 1}
    assert generation.seed == 2**63 + 1
    assert generation.trace_id == "ab" * 16
    assert (generation.stop_string, generation.stop_token_id) == (None, 7)
    assert 0 < generation.first_token_seconds <= generation.seconds
    assert generation.tokens_per_second == 4 / generation.seconds


def test_sync_streams_chunks_and_then_the_result(gateway):
    endpoint, _ = gateway
    with Client(endpoint) as client:
        stream = client.generate("hi")
        texts = [chunk.text for chunk in stream]
        assert texts == ["hé", "", "llo", ""]
        assert_whole(stream.result())
        # The second request on the same client is like the first.
        assert_whole(client.generate("hi").result())


async def test_async_streams_chunks_and_then_the_result(gateway):
    endpoint, _ = gateway
    async with AsyncClient(endpoint) as client:
        stream = client.generate("hi")
        assert [chunk.text async for chunk in stream] == ["hé", "", "llo", ""]
        assert_whole(await stream.result())
        assert_whole(await client.generate("hi").result())


@pytest.mark.parametrize(
    ("prompt", "kind", "part"),
    [
        ("bad", errors.InvalidRequest, "temperature"),
        ("busy", errors.Overloaded, "taken"),
        ("cut", errors.FlashduetError, "before the answer was complete"),
    ],
)
async def test_errors_have_their_class_in_both_clients(gateway, prompt, kind, part):
    endpoint, _ = gateway
    with Client(endpoint) as client, pytest.raises(kind, match=part) as caught:
        client.generate(prompt).result()
    if kind is errors.Overloaded:
        assert caught.value.retry_after_s == 2.5
    if kind is errors.InvalidRequest:
        assert caught.value.violations[0].field == "temperature"
    async with AsyncClient(endpoint) as client:
        with pytest.raises(kind, match=part):
            await client.generate(prompt).result()


def test_nobody_there_is_unavailable():
    with Client("127.0.0.1:1") as client, pytest.raises(errors.Unavailable):
        client.generate("hi", timeout=60).result()


async def test_a_passed_timeout_is_deadline_exceeded(gateway):
    endpoint, servicer = gateway
    with Client(endpoint) as client, pytest.raises(errors.DeadlineExceeded):
        client.generate("slow", timeout=1.5).result()
    assert servicer.cancelled.wait(WAIT_S)
    async with AsyncClient(endpoint) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("slow", timeout=1.5).result()


def test_sync_cancel_from_another_thread_ends_the_stream(gateway):
    endpoint, servicer = gateway
    with Client(endpoint) as client:
        stream = client.generate("slow")
        seen = []
        for chunk in stream:
            seen.append(chunk.token_ids)
            threading.Timer(0.1, stream.cancel).start()
        assert seen == [[4, 5]]
        with pytest.raises(errors.Cancelled):
            stream.result()
    assert servicer.cancelled.wait(WAIT_S)


async def test_async_cancel_ends_the_stream(gateway):
    endpoint, servicer = gateway
    async with AsyncClient(endpoint) as client:
        stream = client.generate("slow")
        async for _ in stream:
            stream.cancel()
        with pytest.raises(errors.Cancelled):
            await stream.result()
    assert await asyncio.to_thread(servicer.cancelled.wait, WAIT_S)


async def test_a_cancelled_task_cancels_the_request_and_stays_cancelled(gateway):
    endpoint, servicer = gateway
    async with AsyncClient(endpoint) as client:
        task = asyncio.create_task(client.generate("slow").result())
        await asyncio.to_thread(servicer.waiting.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(servicer.cancelled.wait, WAIT_S)


async def test_leaving_the_block_early_cancels_the_request(gateway):
    endpoint, servicer = gateway
    async with AsyncClient(endpoint) as client, client.generate("slow") as stream:
        async for _ in stream:
            break
    assert await asyncio.to_thread(servicer.cancelled.wait, WAIT_S)


async def test_models_and_load(gateway):
    endpoint, _ = gateway
    async with AsyncClient(endpoint) as client:
        (card,) = await client.models()
        load = await client.load()
    assert (card.id, card.context_window, card.drafter) == ("tiny", 512, "")
    assert (load.active_requests, load.draft_available) == (1, True)
    with Client(endpoint) as client:
        assert client.models() == [card]
        assert client.load() == load


def test_what_is_not_given_is_absent_on_the_wire():
    request = build_request("hi", {})
    assert not request.HasField("max_tokens")
    assert not request.HasField("model")
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("temperature")
    assert request.speculation == pb.Speculation()


def test_prompts_of_each_kind():
    assert build_request("hi", {}).chat.messages[0].role == "user"
    assert build_request("hi", {"raw": True}).text == "hi"
    chat = build_request([Message("system", "be"), Message("user", "hi")], {}).chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "be"), ("user", "hi")]
    assert build_request((1, 2, 3), {}).token_ids.ids == [1, 2, 3]
    # An empty conversation reaches the gateway as one, to be refused there by name.
    assert build_request([], {}).WhichOneof("prompt") == "chat"
    for wrong in ([1, "two"], [True, False], [Message("user", "x"), 3]):
        with pytest.raises(TypeError, match="prompt"):
            build_request(wrong, {})  # type: ignore[arg-type]


def test_sampling_is_sent_whole_or_field_by_field():
    whole = build_request("hi", {"sampling": Sampling(temperature=0.5, seed=3)}).sampling
    assert (whole.temperature, whole.top_p, whole.seed) == (0.5, 1.0, 3)
    assert whole.HasField("top_k")
    single = build_request("hi", {"temperature": 0.0, "seed": 0}).sampling
    assert single.HasField("temperature")
    assert single.HasField("seed")
    assert not single.HasField("top_p")
    with pytest.raises(TypeError, match="either sampling or"):
        build_request("hi", {"sampling": Sampling(), "seed": 1})


def test_speculation_modes():
    assert build_request("hi", {"block_length": 8}).speculation == pb.Speculation(
        mode=pb.SPECULATION_MODE_FIXED, block_length=8
    )
    alone = build_request("hi", {"drafter_only": True}).speculation
    assert alone == pb.Speculation(drafter_only=True)
    off = build_request("hi", {"speculation": "off"}).speculation
    assert off.mode == pb.SPECULATION_MODE_OFF
    assert not off.HasField("block_length")
    with pytest.raises(TypeError, match="speculation"):
        build_request("hi", {"speculation": "sometimes"})  # type: ignore[typeddict-item]


def test_an_unknown_keyword_is_an_error():
    with Client() as client, pytest.raises(TypeError, match="max_token"):
        client.generate("hi", max_token=3)  # type: ignore[call-arg]


async def test_probe_tells_serving_loading_and_absent():
    server = Server([])
    await server.start("127.0.0.1:0")
    endpoint = f"127.0.0.1:{server.port}"
    try:
        assert await probe(endpoint) is Health.NOT_SERVING
        await server.serving()
        assert await probe(endpoint) is Health.SERVING
    finally:
        await server.stop(0)
    assert await probe(endpoint, timeout_s=1.0) is Health.UNREACHABLE


async def test_probe_of_something_that_speaks_no_grpc_is_unreachable():
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await probe(f"127.0.0.1:{port}", timeout_s=1.0) is Health.UNREACHABLE


def test_channels_are_closed_by_their_block(gateway):
    endpoint, _ = gateway
    with Client(endpoint) as client:
        client.models()
    with pytest.raises(ValueError, match="closed channel"):
        client.models()


def test_every_option_has_its_place_in_the_request():
    request = build_request(
        [Message("user", "hi")],
        {
            "n": 3,
            "top_logprobs": 0,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.25,
            "logit_bias": {5: -1.0},
            "priority": "batch",
            "cache_salt": "tenant",
            "echo": True,
            "template_kwargs": {"enable_thinking": False},
        },
    )
    assert (request.n, request.top_logprobs, request.cache_salt) == (3, 0, "tenant")
    assert request.HasField("top_logprobs")
    assert request.echo
    assert request.priority == PRIORITY_BATCH
    assert dict(request.chat.template_kwargs) == {"enable_thinking": False}
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.25, {5: -1.0})
    assert not sampling.HasField("seed")
    for wrong in ({"priority": "urgent"}, {"template_kwargs": {"x": {1, 2}}}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            build_request("hi", wrong)


def test_answers_are_put_together_by_their_choice():
    collector = Collector(0.0)
    told = {"chosen": {"token_id": 4, "logprob": -0.5, "token_bytes": b"\xc3"}}
    messages = [
        {"started": {"request_id": "r", "seed": 3}},
        {"chunk": {"choice": 1, "text": "b", "token_ids": [8]}},
        {"chunk": {"choice": 0, "text": "a", "token_ids": [4], "logprobs": [told]}},
        {"finished": {"choice": 1, "finish_reason": "FINISH_REASON_LENGTH"}},
        {"chunk": {"choice": 0, "text": "c", "token_ids": [5], "logprobs": [told]}},
        {"finished": {"finish_reason": "FINISH_REASON_STOP", "stop_string": "x"}},
        {"complete": {"usage": {"completion_tokens": 3}}},
    ]
    events = [collector.add(pb.GenerateResponse(**message), 1.0) for message in messages]
    assert [(e.choice, e.finish_reason) for e in events if e and e.finish_reason] == [
        (1, "length"),
        (0, "stop"),
    ]
    whole = collector.generation()
    assert [(c.text, c.token_ids) for c in whole.choices] == [("ac", [4, 5]), ("b", [8])]
    assert (whole.text, whole.stop_string, whole.choices[1].finish_reason) == ("ac", "x", "length")
    entry = TokenLogprob(token_id=4, token=b"\xc3", logprob=-0.5)
    assert whole.logprobs == (PositionLogprobs(entry, ()),) * 2
    assert whole.choices[1].logprobs == ()


def test_a_choice_that_never_finished_is_an_error():
    collector = Collector(0.0)
    for message in ({"started": {}}, {"chunk": {"text": "a"}}, {"complete": {}}):
        collector.add(pb.GenerateResponse(**message), 1.0)
    with pytest.raises(errors.FlashduetError, match="before all of its answers"):
        collector.generation()
