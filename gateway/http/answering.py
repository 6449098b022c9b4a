"""Answers one request: whole, or as server-sent events, for as long as its client is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from flashduet.errors import Cancelled
from flashduet.v1 import gateway_pb2 as pb
from gateway.http.answers import Answers, Event
from gateway.http.errors import error_text, ours
from gateway.http.shapes import Answer, json_response
from gateway.http.writer import Writer

REQUEST_ID = "x-request-id"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the client wants to be answered, whatever it asked.

    Attributes:
        keepalive_s: after so long without an event a stream gets a comment line.
    """

    stream: bool
    usage: bool
    meta_info: bool
    keepalive_s: float


async def answer(request: Request, answers: Answers, writer: Writer, wishes: Wishes) -> Response:
    """The response; from here on it owns the answers and ends them.

    Raises:
        FlashduetError: nothing has been sent, so that the status is still to be chosen.
    """
    began = time.monotonic()
    if wishes.stream:
        return await _streamed(request, answers, writer, wishes, began)
    with closing(answers):
        return await _while_connected(request, _whole(answers, writer, wishes, began))


async def _whole(answers: Answers, writer: Writer, wishes: Wishes, began: float) -> Response:
    totals = writer.totals
    while (event := await answers.next()) is not None:
        totals.add(event)
        if event.response.HasField("chunk"):
            chunk = event.response.chunk
            writer.keep(totals.index(event.prompt, chunk.choice), chunk)
    whole = writer.whole()
    whole.usage = totals.usage()
    _add_stats(whole, writer, wishes, began)
    return json_response(whole, headers=_headers(totals.first_started))


async def _streamed(
    request: Request, answers: Answers, writer: Writer, wishes: Wishes, began: float
) -> Response:
    # Refusals, also the target's, come before the first chunk; until then the status is ours to
    # choose, and the client and all proxies between wait without a sign of life.
    early: list[Event] = []
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(
                _while_connected(request, _until_first_chunk(answers, early)), wishes.keepalive_s
            )
    except BaseException:
        answers.close()
        raise
    return _AnswerStream(early, answers, writer, wishes, began)


async def _until_first_chunk(answers: Answers, early: list[Event]) -> None:
    while (event := await answers.next()) is not None:
        early.append(event)
        if not event.response.HasField("started"):
            return


class _AnswerStream(EventSourceResponse):
    """Server-sent events; however they end, the answers' task does too."""

    def __init__(
        self, early: list[Event], answers: Answers, writer: Writer, wishes: Wishes, began: float
    ) -> None:
        self._early = early
        self._answers = answers
        self._writer = writer
        self._wishes = wishes
        self._began = began
        self._last_finished: Event | None = None
        started = next((e.response.started for e in early if e.response.HasField("started")), None)
        super().__init__(
            self._events(), headers=_headers(started), ping=wishes.keepalive_s, sep="\n"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._answers):
            await super().__call__(scope, receive, send)

    async def _events(self) -> AsyncIterator[dict[str, str]]:
        """An answer that breaks off ends with an error object, as OpenAI's clients expect it."""
        try:
            for opening in self._writer.openings():
                yield self._data(opening)
            async for event in self._core_events():
                for piece in self._pieces(event):
                    yield self._data(piece)
        except Exception as failure:
            yield {"data": error_text(ours(failure))}
        yield {"data": "[DONE]"}

    async def _core_events(self) -> AsyncIterator[Event]:
        for event in self._early:
            yield event
        while (next_event := await self._answers.next()) is not None:
            yield next_event

    def _pieces(self, event: Event) -> Iterator[Answer]:
        writer, totals, response = self._writer, self._writer.totals, event.response
        totals.add(event)
        if response.HasField("chunk"):
            piece = writer.piece(totals.index(event.prompt, response.chunk.choice), response.chunk)
            if piece is not None:
                yield piece
        elif response.HasField("finished"):
            # The last of them waits for the sums that go with it.
            if totals.all_finished:
                self._last_finished = event
            else:
                yield self._closing(event)
        elif totals.over and self._last_finished is not None:
            last = self._closing(self._last_finished)
            if self._wishes.usage:
                yield last
                last = writer.without_choices()
                last.usage = totals.usage()
            _add_stats(last, writer, self._wishes, self._began)
            yield last

    def _closing(self, event: Event) -> Answer:
        finished = event.response.finished
        return self._writer.closing(
            self._writer.totals.index(event.prompt, finished.choice), finished
        )

    def _data(self, piece: Answer) -> dict[str, str]:
        if self._wishes.usage and piece.usage is None:
            # Said to be null in every piece but the one that has it.
            piece.usage = None
        return {"data": piece.json_text()}


def _add_stats(last: Answer, writer: Writer, wishes: Wishes, began: float) -> None:
    last.flashduet = writer.totals.stats()
    if wishes.meta_info:
        last.meta_info = writer.totals.meta_info(writer.answer_id, time.monotonic() - began)


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


def _headers(started: pb.GenerateStarted | None) -> dict[str, str]:
    if started is None:
        return {}
    headers = {REQUEST_ID: started.request_id, "x-flashduet-seed": str(started.seed)}
    return headers | ({"x-flashduet-trace-id": started.trace_id} if started.trace_id else {})
