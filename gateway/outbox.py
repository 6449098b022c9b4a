"""What a request still has to tell its client, between those who make it and the one who sends it.

Sending is off the rounds' way: a round goes on while its tokens travel. It is bounded too: a client
that reads nothing holds up its own request and no other, and costs no more than these few messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from flashduet.v1.gateway_pb2 import GenerateResponse

Emit = Callable[[GenerateResponse], Awaitable[None]]

# Responses that may wait; the client's own buffers hold more.
_MOST_UNSENT = 16


class Outbox:
    """Sends one request's responses in order, from a task of its own while the block runs.

    Used as an async context manager: leaving it in peace waits until all is sent, leaving it by an
    error drops what is not.
    """

    def __init__(self, emit: Emit) -> None:
        """`emit`: awaited for each response in turn, however long it takes."""
        self._emit = emit
        self._unsent: deque[GenerateResponse] = deque()
        # Set by whoever changes what it is named after.
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False
        self._sending: asyncio.Task[None] | None = None

    async def put(self, response: GenerateResponse) -> None:
        """Queue a response; waits while there are too many of them.

        Raises:
            Exception: whatever sending an earlier one raised.
        """
        while len(self._unsent) >= _MOST_UNSENT and not self._task.done():
            self._taken.clear()
            await self._taken.wait()
        if self._task.done():
            self._task.result()
        self._unsent.append(response)
        self._filled.set()

    async def __aenter__(self) -> Self:
        self._sending = asyncio.create_task(self._send(), name="outbox")
        self._sending.add_done_callback(lambda _: self._taken.set())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended = True
        self._filled.set()
        if kind is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            return
        try:
            await self._task
        finally:
            self._task.cancel()

    @property
    def _task(self) -> asyncio.Task[None]:
        if self._sending is None:
            raise RuntimeError("an outbox is used within its `async with` block")
        return self._sending

    async def _send(self) -> None:
        while True:
            while self._unsent:
                await self._emit(self._unsent[0])
                self._unsent.popleft()
                self._taken.set()
            if self._ended:
                return
            self._filled.clear()
            await self._filled.wait()
