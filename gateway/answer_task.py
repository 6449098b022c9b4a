"""A request's answer for a reader that pulls, as HTTP does."""

from __future__ import annotations

import asyncio

from flashduet.v1 import gateway_pb2 as pb
from gateway.gateway import Gateway

# Responses that may wait for a slow client before its request is held up.
_UNREAD_RESPONSES = 8


class AnswerTask:
    """A request's answer, made in a task of its own and read one response at a time.

    The task is the request's one owner from start to end, whoever reads; `close` cancels it.
    """

    def __init__(self, gateway: Gateway, message: pb.GenerateRequest, traceparent: str) -> None:
        self._unread: asyncio.Queue[pb.GenerateResponse | Exception | None] = asyncio.Queue(
            _UNREAD_RESPONSES
        )
        self._task = asyncio.create_task(
            self._run(gateway, message, traceparent), name="http-answer"
        )

    async def next(self) -> pb.GenerateResponse | None:
        """The next response; None after the last.

        Raises:
            FlashduetError: the request failed.
        """
        response = await self._unread.get()
        if isinstance(response, Exception):
            raise response
        return response

    def close(self) -> None:
        """Cancel what is not done yet, and free it."""
        self._task.cancel()

    async def _run(self, gateway: Gateway, message: pb.GenerateRequest, traceparent: str) -> None:
        try:
            await gateway.answer(message, self._unread.put, traceparent=traceparent)
            await self._unread.put(None)
        except Exception as failure:
            await self._unread.put(failure)
