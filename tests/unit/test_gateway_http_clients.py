"""Clients that are too many, leave, stall or see the services fail."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import suppress
from typing import Any

import openai
import pytest

from flashduet.errors import Overloaded
from gateway.answer import Answer
from gateway.http.protocol import BoundedHeadProtocol
from gateway.tokenization import Tokenizer
from tests.unit.http_support import CHAT, COMPLETIONS, HELLO, Http, events, pieces, serve_http
from tests.unit.toy_stack import FOR_EVER_S, WAIT_S, until

pytest_plugins = ["tests.unit.gateway_fixtures"]


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_requests_are_429_with_retry_after(http: Http, stream: bool) -> None:
    http.stack.target.refusal = Overloaded("16 sessions are open", 2.2)
    response = await http.post(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == "rate_limit_error"
    http.stack.target.refusal = None
    http.stack.target.may_verify.clear()
    running = [asyncio.create_task(http.post(max_tokens=3)) for _ in range(4)]
    await until(lambda: http.stack.gateway.counts.active == 4)
    with pytest.raises(openai.RateLimitError):
        await http.chat(stream=stream)
    http.stack.target.may_verify.set()
    assert [(await task).status_code for task in running] == [200] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "verify"])
async def test_a_client_that_goes_away_frees_everything(
    http: Http, stream: bool, phase: str
) -> None:
    target = http.stack.target
    if phase == "prefill":
        target.open_delay_s = FOR_EVER_S
    else:
        target.verify_delay_s = FOR_EVER_S
    asking = asyncio.create_task(http.post(stream=stream))
    await until(lambda: bool(target.verified_lengths if phase == "verify" else target.openings))
    asking.cancel()
    await http.stack.all_free()
    await until(lambda: http.stack.gateway.counts.cancelled == 1)


async def test_a_stream_left_in_the_middle_frees_everything(http: Http) -> None:
    http.stack.target.may_verify.clear()
    body = {"model": "toy", "messages": HELLO, "max_tokens": 400, "stream": True}
    async with http.raw.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    await http.stack.all_free()


async def test_a_target_that_dies_in_mid_stream_ends_it_with_an_error_object(http: Http) -> None:
    http.stack.target.dies_at = 2
    *_, error, done = events(await http.post(stream=True))
    assert done == "[DONE]"
    assert json.loads(error)["error"]["type"] == "service_unavailable_error"
    await until(lambda: http.stack.gateway.served() is not None)
    with pytest.raises(openai.APIError):
        async for _ in await http.chat(stream=True):
            pass
    await http.stack.all_free()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("commit", [1, 3])
async def test_a_mistake_of_ours_is_an_error_object_without_our_insides(
    http: Http, monkeypatch: pytest.MonkeyPatch, caplog, stream: bool, commit: int
) -> None:
    whole, calls = Answer.commit, itertools.count(1)

    def broken(answer: Answer, *given: object) -> object:
        if next(calls) >= commit:
            raise NameError("name 'secret_name' is not defined")
        return whole(answer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "commit", broken)
        response = await http.post(stream=stream)
    if stream and commit > 1:
        lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert error["type"] == "server_error"
    assert "secret_name" not in response.text
    assert "secret_name" in caplog.text
    await http.stack.all_free()


async def test_a_body_that_breaks_off_is_nobody_s_mistake(http: Http, errors) -> None:
    port = http.raw.base_url.port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await asyncio.sleep(0.2)
    assert not errors()
    await http.stack.all_free()


def _raw_request(**fields: Any) -> bytes:
    body = json.dumps({"model": "toy", "messages": HELLO, "max_tokens": 400, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_hang_up_at_any_moment_leave_nothing(
    http: Http, errors, stream: bool
) -> None:
    port = http.raw.base_url.port
    for number in range(60):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_raw_request(stream=stream))
        await asyncio.sleep(number % 20 / 1000)
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()
    await http.stack.all_free()
    assert http.stack.router.route(drafted=True).target.sessions == 0
    assert not errors()
    assert (await http.chat()).usage.completion_tokens == 20


async def test_a_reader_that_does_not_read_holds_up_itself_alone(http: Http) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.raw.base_url.port, limit=1024)
    writer.write(_raw_request(stream=True))
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(3):
        assert (await http.chat()).usage.completion_tokens == 20
    writer.transport.abort()
    await http.stack.all_free()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_whose_prefill_is_slow_says_that_it_lives(
    tokenizer: Tokenizer, path: str
) -> None:
    async with serve_http(tokenizer, http_keepalive_s=0.1) as http:
        fields = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
        http.stack.target.open_delay_s = 1.5
        response = await http.send(path, {"stream": True, **fields})
        assert response.text.startswith((":", "data: ")), response.text
        comments = [line for line in response.text.split("\n") if line.startswith(":")]
        assert len(comments) >= 2
        assert pieces(response)[-1]["choices"][0]["finish_reason"] == "length"
        http.stack.target.refusal = Overloaded("16 sessions are open", 1.0)
        late = await http.send(path, {"stream": True, **fields})
        assert late.status_code == 200
        *_, error, done = events(late)
        assert json.loads(error)["error"]["type"] == "rate_limit_error"
        assert done == "[DONE]"


async def test_a_request_has_a_deadline_without_asking_for_one(tokenizer: Tokenizer) -> None:
    async with serve_http(tokenizer, default_deadline_s=0.5, http_prompts_at_once=1) as http:
        http.stack.target.open_delay_s = 0.3
        # Each of the two would make it, one after the other they do not.
        batch = await http.post_completion(prompt=["a", "b"], max_tokens=1)
        assert batch.status_code == 504
        assert batch.json()["error"]["type"] == "timeout_error"
        http.stack.target.verify_delay_s = 0.3
        assert (await http.post()).status_code == 504
        response = await http.post(stream=True)
        error = response.json() if response.status_code == 504 else json.loads(events(response)[-2])
        assert error["error"]["type"] == "timeout_error"
        await http.stack.all_free()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_a_batch_that_goes_away_frees_all_of_it(http: Http, stream: bool) -> None:
    http.stack.target.verify_delay_s = FOR_EVER_S
    batch = {"prompt": ["a", "b"], "n": 2, "stream": stream}
    asking = asyncio.create_task(http.post_completion(**batch))
    await until(lambda: len(http.stack.target.sessions) == 4)
    asking.cancel()
    await http.stack.all_free()


@pytest.mark.parametrize("said", [b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nhost: a\r\n"])
@pytest.mark.parametrize("after_another", [False, True])
async def test_a_connection_that_never_says_what_it_wants_is_closed(
    http: Http, monkeypatch: pytest.MonkeyPatch, said: bytes, after_another: bool
) -> None:
    monkeypatch.setattr(BoundedHeadProtocol, "head_s", 0.6)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.raw.base_url.port)
    if after_another:
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200")
    writer.write(said)
    # Byte by byte is no way around it.
    for _ in range(4 if said else 0):
        await asyncio.sleep(0.2)
        writer.write(b"x")
    with suppress(ConnectionError):  # Whatever we wrote to the closed connection.
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    http.stack.target.verify_delay_s = 0.8
    assert (await http.post(max_tokens=3)).status_code == 200, "answers may take longer"
