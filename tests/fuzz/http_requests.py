"""Strategies for HTTP requests: good ones with a few fields gone wrong, and bytes gone wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

EDGES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1e-320, 1e308, -2, 100.0, 100.5),
    *(float("nan"), float("inf"), 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400),
    *("", "a", "0", "true", "null", "\0", "\ud800", "é" * 300, "<|im_start|>", "x" * 5000),
    *([], [None], [""], ["a", "b"], [0], [-1], [319], [320], [2**40], [[1, 2], [3]], ["a"] * 70),
    *({}, {"a": 1}, {"type": "text"}, {"include_usage": True}, {"5": 1}, {"5": 1000}, {"x": 1}),
    *([[]], [[[[]]]], {"a": {"b": {"c": {}}}}, [{"role": "user", "content": "x"}]),
]

# Fields of both routes, each with values that are right for it, so that every check is passed by
# some requests and failed by others.
COMMON: dict[str, list[Any]] = {
    "model": ["other"],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "stop": ["x", ["a", "b"]],
    "n": [1, 2, 3],
    "seed": [0, 7, -1],
    "temperature": [0, 1.5],
    "top_p": [0.5],
    "top_k": [-1, 5],
    "min_p": [0.1],
    "max_tokens": [1, 3],
    "logit_bias": [{"5": 10}, {"7": -100}],
    "presence_penalty": [0.5],
    "frequency_penalty": [-0.5],
    "repetition_penalty": [1.2],
    "stop_token_ids": [[5]],
    "ignore_eos": [True],
    "speculation": [{"mode": "off"}, {"mode": "fixed", "block_length": 4}],
    "priority": ["batch", "interactive"],
    "return_meta_info": [True],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "cache_salt": ["s"],
    "tools": [[]],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "unheard_of": [1],
}
CHAT = COMMON | {
    "messages": [[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]],
    "max_completion_tokens": [2],
    "logprobs": [True, False],
    "top_logprobs": [0, 2],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "reasoning_effort": ["low"],
}
COMPLETIONS = COMMON | {
    "prompt": ["hi", ["a", "b"], [5, 6], [[5], [6, 7]]],
    "logprobs": [0, 3],
    "echo": [True],
    "best_of": [1, 2],
    "suffix": ["."],
}
TOKENIZE: dict[str, list[Any]] = {
    "model": ["other"],
    "prompt": ["hi", ["a"]],
    "text": ["hi"],
    "messages": [[{"role": "user", "content": "hi"}]],
    "add_special_tokens": [True],
    "add_generation_prompt": [False],
}
DETOKENIZE: dict[str, list[Any]] = {"model": ["other"], "tokens": [[5, 6], []]}


@dataclass(frozen=True, slots=True)
class Route:
    """A POST route, a body it takes, and its fields with good values."""

    path: str
    body: dict[str, Any]
    fields: dict[str, list[Any]]


def routes(model: str) -> list[Route]:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    return [
        Route("/v1/chat/completions", {"model": model, "max_tokens": 2} | chat, CHAT),
        Route("/v1/completions", {"model": model, "max_tokens": 2, "prompt": "hi"}, COMPLETIONS),
        Route("/tokenize", {"model": model, "prompt": "hi"}, TOKENIZE),
        Route("/detokenize", {"model": model, "tokens": [70, 71]}, DETOKENIZE),
    ]


_junk = st.one_of(
    st.sampled_from(EDGES),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 400) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    ),
)


@st.composite
def _bodies(draw: st.DrawFn, route: Route) -> bytes:
    """JSON of the route's body with some fields changed, sometimes broken afterwards."""
    body = dict(route.body)
    for _ in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(sorted(route.fields)))
        good = draw(st.integers(0, 19)) < 17
        value = draw(st.sampled_from(route.fields[name]) if good else _junk)
        # Without a limit of its own a request is long, and shows nothing that a short one does not.
        if name != "max_tokens" or value is not None:
            body[name] = value
    if draw(st.integers(0, 19)) == 0:
        del body[draw(st.sampled_from(sorted(route.body.keys() - {"max_tokens"})))]
    text = json.dumps(body).encode()
    return draw(broken(text)) if draw(st.integers(0, 9)) == 0 else text


@st.composite
def broken(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a few replaced, cut out or put in."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(made)))
        end = min(len(made), start + draw(st.integers(0, 4)))
        made[start:end] = draw(st.binary(max_size=4))
    return bytes(made)


def request_bytes(method: str, path: str, body: bytes, *more: str) -> bytes:
    """A whole HTTP/1.1 request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *more]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


_HEADERS = st.sampled_from(
    [
        *("Content-Type: application/json", "Content-Type: text/plain", "Content-Type: x" * 50),
        *("X-Request-Id: mine", "X-Request-Id: \xe9", "X-Request-Id: " + "y" * 300),
        *("traceparent: 00-" + "1" * 32 + "-" + "2" * 16 + "-01", "traceparent: 00-0-0-0"),
        *("Authorization: Bearer x", "Accept: text/event-stream", "Expect: 100-continue"),
        *("Accept-Encoding: gzip", "Content-Encoding: gzip", "Cookie: a=b", "X: " + "z" * 5000),
    ]
)


def posts(model: str) -> st.SearchStrategy[bytes]:
    """Whole POST requests to the routes that have bodies."""

    @st.composite
    def post(draw: st.DrawFn) -> bytes:
        # Most of the work is behind the first two.
        route = draw(st.sampled_from([routes(model)[index] for index in (0, 0, 0, 1, 1, 1, 2, 3)]))
        headers = draw(st.lists(_HEADERS, max_size=2, unique=True))
        return request_bytes("POST", route.path, draw(_bodies(route)), *headers)

    return post()


@st.composite
def _paths(draw: st.DrawFn, model: str) -> bytes:
    """Requests of any method to any path, without a body."""
    method = draw(
        st.sampled_from(["GET", "GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "XYZ"])
    )
    known = st.sampled_from(
        [
            *(
                "/v1/models",
                f"/v1/models/{model}",
                "/health",
                "/ready",
                "/metrics",
                "/openapi.json",
            ),
            *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1", "/"),
        ]
    )
    odd = st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=30)
    path = draw(st.one_of(known, known, odd.map(lambda text: "/" + text)))
    query = draw(st.sampled_from(["", "", "?", "?a=b", "?%", "?model=" + "x" * 2000]))
    return request_bytes(method, path + query, b"")


def paths(model: str) -> st.SearchStrategy[bytes]:
    return _paths(model)


def broken_requests(model: str) -> st.SearchStrategy[bytes]:
    """Bytes that are nearly an HTTP request."""
    whole = posts(model) | paths(model)
    return whole.flatmap(broken) | st.binary(max_size=200)
