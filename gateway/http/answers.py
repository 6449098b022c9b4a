"""The answers to one HTTP request's prompts, for a reader that pulls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flashduet.errors import DeadlineExceeded
from flashduet.v1 import gateway_pb2 as pb
from gateway.gateway import Gateway

# Responses that may wait for a slow client before its request is held up.
_UNREAD_RESPONSES = 8


@dataclass(frozen=True, slots=True)
class Event:
    """One response of the core, and the index of the prompt that it belongs to."""

    prompt: int
    response: pb.GenerateResponse


class Answers:
    """Answers made in a task of their own and read one event at a time.

    The task is the requests' one owner from start to end, whoever reads; `close` cancels it. A few
    prompts are answered at a time; the first that fails ends all.
    """

    def __init__(
        self,
        gateway: Gateway,
        messages: Sequence[pb.GenerateRequest],
        *,
        traceparent: str,
        at_once: int,
        deadline_s: float,
    ) -> None:
        """`deadline_s`: from now, for all of them together."""
        self._gateway = gateway
        self._traceparent = traceparent
        self._turns = asyncio.Semaphore(at_once)
        self._deadline = time.monotonic() + deadline_s
        self._unread: asyncio.Queue[Event | Exception | None] = asyncio.Queue(_UNREAD_RESPONSES)
        # How it ended, once that has been read; it can be read again.
        self._over = False
        self._failure: Exception | None = None
        self._task = asyncio.create_task(self._run(messages), name="http-answers")

    async def next(self) -> Event | None:
        """The next event; None after the last. Cancelling the wait loses none.

        Raises:
            FlashduetError: a request failed.
        """
        event = None if self._over else await self._unread.get()
        if isinstance(event, Event):
            return event
        self._over, self._failure = True, event or self._failure
        if self._failure is not None:
            raise self._failure
        return None

    def close(self) -> None:
        """Cancel what is not done yet, and free it."""
        self._task.cancel()

    async def _run(self, messages: Sequence[pb.GenerateRequest]) -> None:
        end: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, message in enumerate(messages):
                    tasks.create_task(self._answer(index, message))
        except ExceptionGroup as failures:
            end = failures.exceptions[0]
        await self._unread.put(end)

    async def _answer(self, prompt: int, message: pb.GenerateRequest) -> None:
        async def emit(response: pb.GenerateResponse) -> None:
            await self._unread.put(Event(prompt, response))

        async with self._turns:
            time_left_s = self._deadline - time.monotonic()
            if time_left_s <= 0:
                raise DeadlineExceeded("the request's time is over")
            await self._gateway.answer(
                message, emit, traceparent=self._traceparent, time_left_s=time_left_s
            )
