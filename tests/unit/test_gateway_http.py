"""The OpenAI side, read by the openai SDK's own models over a real HTTP connection."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from flashduet.errors import Overloaded
from gateway.answer import Answer
from gateway.http import create_app
from gateway.http_server import HttpServer
from gateway.openai_request import HARMLESS, UNSUPPORTED
from gateway.tokenization import GenerationDefaults, Tokenizer
from tests.support.tiny import IM_END
from tests.unit.gateway_support import (
    ToyStack,
    ids_of,
    plain_answer,
    tokenizer_folder,
    toy_stack,
    until,
)

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Http:
    """The toy pair behind HTTP, with both kinds of client."""

    stack: ToyStack
    sdk: openai.AsyncOpenAI
    raw: httpx.AsyncClient

    async def chat(self, **fields: Any) -> ChatCompletion:
        fields = {"model": "toy", "messages": HELLO, "max_tokens": 20, **fields}
        return await self.sdk.chat.completions.create(**fields)

    async def post(self, **fields: Any) -> httpx.Response:
        body = {"model": "toy", "messages": HELLO, "max_tokens": 20, **fields}
        return await self.raw.post("/v1/chat/completions", json=body)

    async def events(self, **fields: Any) -> list[str]:
        """The data of each server-sent event."""
        response = await self.post(stream=True, **fields)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_folder(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest_asyncio.fixture
async def http(tokenizer: Tokenizer) -> AsyncIterator[Http]:
    async with toy_stack(tokenizer, max_requests=4) as stack:
        server = HttpServer(create_app(stack.gateway), shutdown_grace_s=1)
        await server.start("127.0.0.1:0")
        url = f"http://127.0.0.1:{server.port}"
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)
        async with sdk, httpx.AsyncClient(base_url=url, timeout=10) as raw:
            yield Http(stack, sdk, raw)
        await server.stop()


def script(http: Http, text: str) -> str:
    http.stack.target.script = [*ids_of(text), IM_END]
    return text


async def test_a_whole_answer(http: Http) -> None:
    text = script(http, "Grüße, 世界 👋")
    answer = await http.chat(max_tokens=100)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage.completion_tokens == len(ids_of(text)) + 1
    assert answer.usage.prompt_tokens == len(http.stack.target.openings[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    await http.stack.all_free()


async def test_a_streamed_answer(http: Http) -> None:
    text = script(http, "Grüße, 世界 👋")
    stream = await http.chat(stream=True, max_tokens=100)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    await http.stack.all_free()


async def test_every_response_object_has_the_fields_that_openai_requires(http: Http) -> None:
    """Strictly: no required field missing, no object mislabelled."""
    script(http, "hi")
    body = (await http.post()).json()
    ChatCompletion.model_validate(body, strict=True)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    *events, done = await http.events(stream_options={"include_usage": True})
    assert done == "[DONE]"
    for event in map(json.loads, events):
        ChatCompletionChunk.model_validate(event, strict=True)
        assert event["object"] == "chat.completion.chunk"
    *pieces, last = map(json.loads, events)
    assert all(piece["usage"] is None and len(piece["choices"]) == 1 for piece in pieces)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]


async def test_length_is_told_from_stop(http: Http) -> None:
    assert (await http.chat(max_tokens=3)).choices[0].finish_reason == "length"
    assert (await http.chat(max_completion_tokens=2)).usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_over_http(http: Http, stream: bool) -> None:
    script(http, "one STOP two")
    answer = await http.chat(stop="STOP", stream=stream, max_tokens=50)
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in answer])
    else:
        text = answer.choices[0].message.content
    assert text == "one "


async def test_sampling_fields_reach_the_target(http: Http) -> None:
    await http.chat(temperature=0.7, top_p=0.9, seed=11, extra_body={"top_k": 40, "min_p": 0.05})
    sampling = http.stack.target.openings[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.7, 0.9, 11)
    assert (sampling.top_k, sampling.min_p) == (40, 0.05)
    await http.chat(seed=-1, extra_body={"top_k": -1})
    sampling = http.stack.target.openings[-1].sampling
    assert (sampling.seed, sampling.top_k) == (2**64 - 1, 0)


async def test_absent_temperature_is_openais_or_the_checkpoints(http: Http) -> None:
    await http.chat()
    assert http.stack.target.openings[-1].sampling.temperature == 1.0
    http.stack.gateway.tokenizer.defaults = GenerationDefaults(temperature=0.6, top_k=20)
    try:
        await http.chat()
        sampling = http.stack.target.openings[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)
        await http.chat(temperature=0)
        assert http.stack.target.openings[-1].sampling.temperature == 0
    finally:
        http.stack.gateway.tokenizer.defaults = GenerationDefaults()


async def test_the_answer_is_the_same_as_over_grpc_and_without_drafts(http: Http) -> None:
    for speculation in ({"mode": "off"}, {"mode": "fixed", "block_length": 4}):
        answer = await http.chat(temperature=0, extra_body={"speculation": speculation})
        prompt = list(http.stack.target.openings[-1].token_ids)
        expected = http.stack.gateway.tokenizer.decode(plain_answer(prompt, 20))
        assert answer.choices[0].message.content == expected


async def test_models_and_health(http: Http) -> None:
    (model,) = (await http.sdk.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("toy", "model", "flashduet")
    assert (await http.sdk.models.retrieve("toy")).id == "toy"
    with pytest.raises(openai.NotFoundError):
        await http.sdk.models.retrieve("other/name")
    assert (await http.raw.get("/health")).status_code == 200
    await http.stack.target_server.stop(0)
    await until(lambda: http.stack.gateway.served() is None)
    assert (await http.raw.get("/health")).status_code == 503
    response = await http.post()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert (await http.sdk.models.list()).data == []


REFUSED = [
    ({"n": 2}, "n"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"guided_json": {}}, "guided_json"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": 10**12}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"model": "gpt-4"}, "model"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
    ({"speculation": {"mode": "wild"}}, "speculation.mode"),
    ({"speculation": {"block_length": 33}}, "speculation.block_length"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
]


async def test_what_would_change_the_output_is_refused_by_name(http: Http) -> None:
    for fields, param in REFUSED:
        response = await http.raw.post(
            "/v1/chat/completions",
            content=json.dumps({"model": "toy", "messages": HELLO, **fields}),
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error", fields
        assert error["param"].startswith(param), (fields, error)
        assert error["message"].startswith(error["param"]), (fields, error)
        assert error["code"] == ("model_not_found" if param == "model" else "invalid_value")
    assert not http.stack.target.openings


async def test_what_cannot_change_the_output_is_accepted(http: Http) -> None:
    harmless = dict.fromkeys(HARMLESS, "x") | {"metadata": {"a": "b"}, "store": True}
    unused = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    plain = (await http.post(temperature=0)).json()["choices"]
    assert (await http.post(temperature=0, **harmless)).json()["choices"] == plain
    assert (await http.post(temperature=0, **unused)).json()["choices"] == plain
    nulls = dict.fromkeys([*UNSUPPORTED, "stop", "seed", "stream_options", "user"])
    assert (await http.post(temperature=0, **nulls)).json()["choices"] == plain


async def test_echoed_and_multipart_messages(http: Http) -> None:
    first = await http.chat(max_tokens=4)
    history = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}],
        },
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "more"},
    ]
    await http.chat(messages=history)
    prompt = http.stack.gateway.tokenizer.decode(
        http.stack.target.openings[-1].token_ids, include_special_tokens=True
    )
    assert prompt.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhey<|im_end|>"
    )


async def test_bodies_that_are_no_request(http: Http) -> None:
    for content in (b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000):
        response = await http.raw.post("/v1/chat/completions", content=content)
        assert response.status_code == 400, content[:10]
        assert response.json()["error"]["param"] == "body"


async def test_unknown_routes_and_methods_answer_in_the_same_form(http: Http) -> None:
    assert (await http.raw.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    assert (await http.raw.get("/v1/chat/completions")).status_code == 405


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_requests_are_429_with_retry_after(http: Http, stream: bool) -> None:
    http.stack.target.refusal = Overloaded("16 sessions are open", 2.2)
    response = await http.post(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == "rate_limit_error"
    http.stack.target.refusal = None
    http.stack.target.verify_delay_s = 0.2
    running = [asyncio.create_task(http.post(max_tokens=3)) for _ in range(4)]
    await until(lambda: http.stack.gateway.counts.active == 4)
    with pytest.raises(openai.RateLimitError):
        await http.chat(stream=stream)
    assert [(await task).status_code for task in running] == [200] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "verify"])
async def test_a_client_that_goes_away_frees_everything_within_a_second(
    http: Http, stream: bool, phase: str
) -> None:
    target = http.stack.target
    if phase == "prefill":
        target.open_delay_s = 5.0
    else:
        target.verify_delay_s = 5.0
    asking = asyncio.create_task(http.post(stream=stream))
    await until(lambda: bool(target.verified_lengths if phase == "verify" else target.openings))
    asking.cancel()
    assert await http.stack.all_free(timeout_s=1.0) < 1.0
    await until(lambda: http.stack.gateway.counts.cancelled == 1)


async def test_a_stream_left_in_the_middle_frees_everything_within_a_second(http: Http) -> None:
    http.stack.target.verify_delay_s = 0.02
    body = {"model": "toy", "messages": HELLO, "max_tokens": 400, "stream": True}
    async with http.raw.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    assert await http.stack.all_free(timeout_s=1.0) < 1.0


async def test_a_target_that_dies_in_mid_stream_ends_it_with_an_error_object(http: Http) -> None:
    http.stack.target.dies_at = 2
    *_, error, done = await http.events()
    assert done == "[DONE]"
    assert json.loads(error)["error"]["type"] == "service_unavailable_error"
    await until(lambda: http.stack.gateway.served() is not None)
    with pytest.raises(openai.APIError):
        async for _ in await http.chat(stream=True):
            pass
    await http.stack.all_free()


async def test_request_ids_seeds_and_nothing_else_are_told_in_headers(http: Http) -> None:
    response = await http.raw.post(
        "/v1/chat/completions",
        json={"model": "toy", "messages": HELLO, "max_tokens": 2, "seed": 5},
        headers={"x-request-id": "mine-1"},
    )
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-flashduet-seed"] == "5"
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert "server" not in response.headers


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


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b"null",
        b"[]",
        b'"text"',
        b"1",
        b"NaN",
        DEEP.encode(),
        b"9" * 10_000,
        *(
            (b'{"model": "toy", "messages": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}")
            for depth in range(50, 1000, 50)
        ),
        b'{"model": "toy", "messages": [null]}',
        b'{"model": "toy", "messages": [[null, {"role": null}]]}',
        b'{"model": "toy", "messages": [{"role": "user", "content": [null]}], "stop": [null, 1]}',
        b'{"model": "toy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "toy", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"model": "toy", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"model": "toy", "messages": [{"role": "user", "content": "a"}], "seed": 1e30}',
        b'{"model": "toy", "messages": [{"role": "user", "content": "a"}], "top_k": '
        + b"9" * 4000
        + b"}",
        b'{"model": "toy", "messages": [{"role": "user", "content": "a"}], "stop": "'
        + b"s" * 5000
        + b'"}',
        b'{"model": "toy", "messages": [{"role": "user", "content": "a"}], "n": {"a": [1]}}',
        b'{"model": {"a": 1}, "messages": "a"}',
        b'{"a" : 1, "a" : {"b": null}}',
    ],
    ids=lambda body: repr(body[:60]) + str(len(body)),
)
async def test_no_body_breaks_the_gateway(http: Http, caplog, body: bytes) -> None:
    response = await http.raw.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 2000
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("GET", "/v1/models/%ff%fe", 404),
        ("GET", "/v1/models/" + "x" * 3000, 404),
        ("GET", "/docs/../v1/nothing", 404),
        ("BREW", "/v1/models", 405),
    ],
)
async def test_other_methods_and_paths_get_an_error_object(
    http: Http, method: str, path: str, status: int
) -> None:
    response = await http.raw.request(method, path)
    assert response.status_code == status
    if method != "HEAD":
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_breaks_off_is_nobody_s_mistake(http: Http, caplog) -> None:
    port = http.raw.base_url.port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await asyncio.sleep(0.2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    await http.stack.all_free()


def _raw_request(**fields: Any) -> bytes:
    body = json.dumps({"model": "toy", "messages": HELLO, "max_tokens": 400, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_hang_up_at_any_moment_leave_nothing(
    http: Http, caplog, stream: bool
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
    # The toy draft's own complaints about sessions that are gone are not meant.
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not [record for record in errors if "ToyDraft" not in record.getMessage()]
    assert (await http.chat()).usage.completion_tokens == 20


async def test_a_reader_that_does_not_read_holds_up_itself_alone(http: Http) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.raw.base_url.port, limit=1024)
    writer.write(_raw_request(stream=True))
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(3):
        assert (await http.chat()).usage.completion_tokens == 20
    writer.transport.abort()
    await http.stack.all_free()
