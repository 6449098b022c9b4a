"""The OpenAI-compatible side: /v1/chat/completions, /v1/models and /health."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import closing
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from flashduet.errors import (
    Cancelled,
    FlashduetError,
    InvalidRequest,
    Unavailable,
    internal_error,
)
from flashduet.v1 import gateway_pb2 as pb
from gateway import openai_response
from gateway.answer_task import AnswerTask
from gateway.gateway import Gateway
from gateway.openai_request import ChatCompletionRequest, parse, to_generate
from gateway.openai_response import ChatCompletionWriter

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
# A comment line that keeps proxies from closing a quiet stream.
_PING_S = 15
_REQUEST_ID = "x-request-id"
_T = TypeVar("_T")


def create_app(gateway: Gateway) -> FastAPI:
    """The routes, over one gateway."""
    app = FastAPI(title="Flashduet", openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        """200 only while a target serves."""
        if gateway.served() is None:
            return JSONResponse({"status": "unavailable"}, 503, {"retry-after": "1"})
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        served = gateway.served()
        data = [openai_response.model(served)] if served is not None else []
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        served = gateway.served()
        if served is None or served.name != name:
            return _error(InvalidRequest("model", name, "is not served"), status=404)
        return JSONResponse(openai_response.model(served))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _chat_completions(gateway, request)

    @app.exception_handler(FlashduetError)
    async def refused(_: Request, failure: FlashduetError) -> Response:
        return _error(failure)

    @app.exception_handler(HTTPException)
    async def no_such_route(_: Request, failure: HTTPException) -> Response:
        body = {"message": failure.detail, "type": "invalid_request_error"}
        return JSONResponse(
            {"error": {**body, "param": None, "code": None}}, failure.status_code, failure.headers
        )

    @app.exception_handler(Exception)
    async def broken(_: Request, failure: Exception) -> Response:
        return _error(_ours(failure))

    return app


async def _chat_completions(gateway: Gateway, request: Request) -> Response:
    asked = parse(await _json_body(request))
    if gateway.tokenizer is None:
        raise Unavailable("no target serves at the moment")
    message = to_generate(asked, gateway.tokenizer.defaults, request.headers.get(_REQUEST_ID))
    answer = AnswerTask(gateway, message, request.headers.get("traceparent", ""))
    if asked.stream:
        return await _streamed(request, asked, answer)
    with closing(answer):
        return await _while_connected(request, _whole(answer))


async def _whole(answer: AnswerTask) -> Response:
    texts: list[str] = []
    started, complete = pb.GenerateStarted(), pb.GenerateComplete()
    while (response := await answer.next()) is not None:
        match response.WhichOneof("message"):
            case "started":
                started = response.started
            case "chunk":
                texts.append(response.chunk.text)
            case "complete":
                complete = response.complete
    writer = ChatCompletionWriter(started, int(time.time()))
    return JSONResponse(writer.completion("".join(texts), complete), headers=_headers(started))


async def _streamed(request: Request, asked: ChatCompletionRequest, answer: AnswerTask) -> Response:
    try:
        # Refusals, also the target's, come before the first chunk; until then the status is ours
        # to choose.
        started = await _while_connected(request, answer.next())
        first = await _while_connected(request, answer.next())
    except BaseException:
        answer.close()
        raise
    if started is None or first is None:
        raise FlashduetError("the answer ended before its first chunk")
    writer = ChatCompletionWriter(started.started, int(time.time()))
    return _AnswerStream(writer, asked, first, answer, _headers(started.started))


class _AnswerStream(EventSourceResponse):
    """The rest of an answer as server-sent events; however it ends, the answer's task does too."""

    def __init__(
        self,
        writer: ChatCompletionWriter,
        asked: ChatCompletionRequest,
        first: pb.GenerateResponse,
        answer: AnswerTask,
        headers: dict[str, str],
    ) -> None:
        self._writer = writer
        self._with_usage = asked.include_usage
        self._first = first
        self._answer = answer
        super().__init__(self._events(), headers=headers, ping=_PING_S, sep="\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._answer):
            await super().__call__(scope, receive, send)

    async def _events(self) -> AsyncIterator[dict[str, str]]:
        """An answer that breaks off ends with an error object, as OpenAI's clients expect it."""
        yield {"data": self._writer.opening(with_usage=self._with_usage)}
        response: pb.GenerateResponse | None = self._first
        try:
            while response is not None:
                for data in self._data(response):
                    yield {"data": data}
                response = await self._answer.next()
        except Exception as failure:
            yield {"data": json.dumps(openai_response.error(_ours(failure)))}
        yield {"data": "[DONE]"}

    def _data(self, response: pb.GenerateResponse) -> Iterator[str]:
        if response.HasField("complete"):
            yield self._writer.closing(response.complete, with_usage=self._with_usage)
            if self._with_usage:
                yield self._writer.usage(response.complete)
        elif response.chunk.text:
            yield self._writer.text(response.chunk.text, with_usage=self._with_usage)


async def _while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """The work's result; it is cancelled as soon as the client has gone.

    Raises:
        Cancelled: nobody is left to answer.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client went away")
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json_body(request: Request) -> Any:
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise InvalidRequest("body", f"over {size} bytes", f"at most {MAX_BODY_BYTES}")
            parts.append(part)
    except ClientDisconnect:
        raise Cancelled("the client went away in the middle of its request") from None
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", "no JSON", f"must be JSON ({error})") from error


def _ours(failure: Exception) -> FlashduetError:
    """What a client may know of a failure; a mistake of ours goes to the log."""
    if isinstance(failure, FlashduetError):
        return failure
    logger.error("a request failed", exc_info=failure)
    return internal_error()


def _headers(started: pb.GenerateStarted) -> dict[str, str]:
    headers = {_REQUEST_ID: started.request_id, "x-flashduet-seed": str(started.seed)}
    return headers | ({"x-flashduet-trace-id": started.trace_id} if started.trace_id else {})


def _error(failure: FlashduetError, status: int | None = None) -> Response:
    headers = {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(failure.retry_after_s)))
    return JSONResponse(openai_response.error(failure), status or failure.http_status, headers)
