"""The part of the campaign that schemathesis draws from our own OpenAPI document.

What the document allows is sent, and what it forbids; each answer must be one that the document
has, in the shape that it shows.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, CheckFunction, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.examples import Runner, for_each_batch
from tests.fuzz.grpc_messages import Place
from tests.fuzz.http_parts import wrong
from tests.fuzz.http_wire import HttpAnswer
from tests.fuzz.report import Part

_CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
_TIMEOUT_S = 120
_MOST_TOKENS = 3


def run_schema(runner: Runner, place: Place, count: int, seed: int) -> list[Part]:
    """Every operation of the document, in good and in bad words."""
    base = f"http://{place.http_host}:{place.http_port}"
    document = schemathesis.openapi.from_url(f"{base}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    cases = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE or operation.body
    ]
    part, sessions = Part("http by schemathesis"), threading.local()

    def send(case: Case) -> None:
        _shorten(case, place.model)
        if not hasattr(sessions, "own"):
            sessions.own = requests.Session()
        try:
            answer = case.call(base_url=base, session=sessions.own, timeout=_TIMEOUT_S)
        except requests.RequestException as error:
            part.count("no answer", f"{error!r:.300} to {case.as_curl_command()[:1000]}")
            return
        try:
            case.validate_response(answer, checks=_checks(answer))
        except FailureGroup as group:
            told = "; ".join(str(failure)[:500] for failure in group.exceptions)
            part.count(str(answer.status_code), f"{told} to {case.as_curl_command()[:1000]}")
        else:
            part.count(str(answer.status_code), _wrong_events(answer))

    with ThreadPoolExecutor(runner.at_once) as threads:

        async def send_all(batch: list[Case]) -> None:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(threads, send, case) for case in batch))

        with part.timed():
            for_each_batch(runner, st.one_of(cases), count, seed, send_all)
    return [part]


def _wrong_events(answer: Response) -> str | None:
    headers = {name.lower(): values[0] for name, values in answer.headers.items()}
    problem = wrong(HttpAnswer(answer.status_code, headers, answer.content))
    return problem and f"{problem}: {answer.content[:300]!r}"


def _checks(answer: Response) -> list[CheckFunction]:
    """Events are documented as text, and schemathesis would hold each against that as an object."""
    if answer.headers["content-type"][0].startswith("text/event-stream"):
        return [check for check in _CHECKS if check is not response_schema_conformance]
    return _CHECKS


def _shorten(case: Case, model: str) -> None:
    """Ask the served model, which no generator would guess, and for a short answer."""
    body: Any = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and len(body["model"]) % 4:
        body["model"] = model
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and _MOST_TOKENS < body[name] < 100_000:
            body[name] = _MOST_TOKENS
    if body.get("max_tokens") is None and "messages" in body:
        body["max_tokens"] = _MOST_TOKENS
