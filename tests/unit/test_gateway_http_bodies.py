"""Who is let in, how much is read, and what is no request at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest

from gateway.tokenization import Tokenizer
from tests.unit.http_support import CHAT, COMPLETIONS, HELLO, Http, serve_http

pytest_plugins = ["tests.unit.gateway_fixtures"]


@pytest.mark.parametrize("announced", [False, True])
async def test_a_body_over_the_limit_is_413(tokenizer: Tokenizer, announced: bool) -> None:
    async with serve_http(tokenizer, http_max_body_bytes=2048) as http:
        body = json.dumps({"model": "toy", "messages": HELLO, "user": "x" * 4096}).encode()

        async def parts() -> AsyncIterator[bytes]:
            yield body

        response = await http.raw.post(CHAT, content=body if announced else parts())
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert (await http.post()).status_code == 200


async def test_a_body_that_is_announced_too_large_is_not_waited_for(http: Http) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.raw.base_url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999\r\n\r\n")
    status = await asyncio.wait_for(reader.readline(), 10)
    assert status.split()[1] == b"413"
    writer.close()


async def test_with_keys_set_only_probes_are_open(tokenizer: Tokenizer) -> None:
    async with serve_http(tokenizer, api_keys="sk-one,sk-two") as http:
        for path in ("/health", "/ready", "/openapi.json"):
            assert (await http.raw.get(path)).status_code == 200
        opened_by_get = ["/v1/models", "/v1/models/toy", "/metrics"]
        for path in [*opened_by_get, CHAT, COMPLETIONS, "/tokenize", "/detokenize"]:
            for headers in ({}, {"authorization": "Bearer sk-three"}):
                method = "GET" if path in opened_by_get else "POST"
                response = await http.raw.request(method, path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await http.chat()
        assert not http.stack.target.openings
        assert (await http.sdk.with_options(api_key="sk-two").models.list()).data
        answer = await http.sdk.with_options(api_key="sk-one").chat.completions.create(
            model="toy", messages=HELLO, max_tokens=2
        )
        assert answer.usage.completion_tokens == 2


async def test_other_origins_may_ask_only_where_that_is_set(tokenizer: Tokenizer) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with serve_http(tokenizer) as http:
        response = await http.raw.options(CHAT, headers=asked)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
    async with serve_http(tokenizer, http_cors_origins="https://page.example") as http:
        response = await http.raw.options(CHAT, headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        response = await http.raw.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in response.headers


DEEP = "[" * 100_000


async def test_bodies_that_are_no_request(http: Http) -> None:
    for content in (b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000):
        response = await http.raw.post("/v1/chat/completions", content=content)
        assert response.status_code == 400, content[:10]
        assert response.json()["error"]["param"] == "body"


async def test_unknown_routes_and_methods_answer_in_the_same_form(http: Http) -> None:
    assert (await http.raw.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    assert (await http.raw.get("/v1/chat/completions")).status_code == 405


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
async def test_no_body_breaks_the_gateway(http: Http, errors, body: bytes) -> None:
    response = await http.raw.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 2000
    assert not errors()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", "/docs", 404),
        ("GET", "/tokenize", 405),
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
