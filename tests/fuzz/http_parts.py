"""The parts of the campaign that send HTTP, and what an answer must be like."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable

from hypothesis import strategies as st

from tests.fuzz import http_requests
from tests.fuzz.examples import Runner, for_each_batch
from tests.fuzz.grpc_messages import Place
from tests.fuzz.http_wire import HttpAnswer, Wire, WireError
from tests.fuzz.report import Part

_LEAKS = re.compile(rb'Traceback|File "|site-packages|<object | at 0x[0-9a-f]{6}')
_MOST_MESSAGE = 2000
# What the HTTP server itself says to bytes that are no HTTP.
_NO_HTTP = b"Invalid HTTP request received."


def wrong(answer: HttpAnswer) -> str | None:
    """What is wrong with an answer to any request; None if nothing is."""
    if answer.status >= 500:
        return f"status {answer.status}"
    if answer.status == 429 and not answer.headers.get("retry-after", "").isdecimal():
        return "429 without Retry-After"
    if answer.status >= 400:
        return _wrong_error(answer)
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return _wrong_stream(answer.body)
    if kind.startswith("application/json"):
        return _no_json(answer.body)
    return None


def _wrong_error(answer: HttpAnswer) -> str | None:
    if answer.body == _NO_HTTP:
        return None
    if _LEAKS.search(answer.body):
        return "an error that shows our insides"
    if (problem := _no_json(answer.body)) is not None:
        return problem
    error = json.loads(answer.body)
    if not isinstance(error, dict) or set(error) != {"error"}:
        return "an error that is no error object"
    if set(error["error"]) != {"message", "type", "param", "code"}:
        return "an error object with other keys than OpenAI's"
    if not 0 < len(error["error"]["message"]) <= _MOST_MESSAGE:
        return f"an error message of {len(error['error']['message'])} characters"
    return None


def _wrong_stream(body: bytes) -> str | None:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return "a stream without [DONE]"
    for event in events[:-1]:
        if (problem := _no_json(event)) is not None:
            return problem
        if (error := json.loads(event).get("error")) and error["type"] == "server_error":
            return f"a stream that broke off: {error['message']}"
    return None


def _no_json(body: bytes) -> str | None:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        json.loads(body, parse_constant=refuse)
    except ValueError as error:
        return f"no JSON: {error}: {body[:200]!r}"
    return None


def run_http(runner: Runner, place: Place, requests: int, seed: int) -> Iterable[Part]:
    """Three parts: bodies and paths are answered on kept connections, broken bytes on new ones."""
    plan = [
        ("http bodies", http_requests.posts(place.model), 75, False),
        ("http paths", http_requests.paths(place.model), 15, False),
        ("http broken bytes", http_requests.broken_requests(place.model), 10, True),
    ]
    for name, strategy, percent, is_broken in plan:
        address = (place.http_host, place.http_port)
        yield _run(runner, name, address, strategy, requests * percent // 100, seed, is_broken)


def _run(
    runner: Runner,
    name: str,
    address: tuple[str, int],
    strategy: st.SearchStrategy[bytes],
    requests: int,
    seed: int,
    is_broken: bool,
) -> Part:
    part = Part(name)
    wires = [Wire(*address) for _ in range(runner.at_once)]
    free: asyncio.Queue[Wire] = asyncio.Queue()
    for wire in wires:
        free.put_nowait(wire)

    async def send(request: bytes) -> None:
        wire = await free.get()
        try:
            answer = await (wire.send_broken(request) if is_broken else wire.send(request))
        except WireError as error:
            part.count("no answer", f"{error} to {request[:1000]!r}")
            return
        finally:
            free.put_nowait(wire)
        problem = "hung up" if answer.status == 0 and not is_broken else wrong(answer)
        part.count(
            str(answer.status or "closed"),
            problem and f"{problem}: {answer.body[:300]!r} to {request[:1000]!r}",
        )

    async def send_all(batch: list[bytes]) -> None:
        await asyncio.gather(*map(send, batch))

    with part.timed():
        for_each_batch(runner, strategy, requests, seed, send_all)
    for wire in wires:
        runner.loop.call_soon_threadsafe(wire.close)
    return part
