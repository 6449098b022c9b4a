"""The answers to one HTTP request's prompts, for a reader that pulls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flashduet.errors import DeadlineExceeded, Overloaded
from flashduet.v1 import gateway_pb2 as pb
from gateway.gateway import Gateway
from gateway.outbox import Emit

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
    prompts are answered at a time; the first that fails ends all. A prompt that finds no room while
    others are being answered waits for it, so that what they cost is not thrown away.
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
        # Prompts that the core has taken and not refused.
        self._making = 0
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
        spoken = False

        async def emit(response: pb.GenerateResponse) -> None:
            nonlocal spoken
            spoken = spoken or response.HasField("chunk")
            await self._unread.put(Event(prompt, response))

        async with self._turns:
            while True:
                try:
                    self._making += 1
                    return await self._make(message, emit)
                except Overloaded as refusal:
                    if spoken or self._making == 1:
                        raise
                    wait_s = min(refusal.retry_after_s or 0.0, self._time_left_s())
                finally:
                    self._making -= 1
                await asyncio.sleep(wait_s)

    async def _make(self, message: pb.GenerateRequest, emit: Emit) -> None:
        time_left_s = self._time_left_s()
        if time_left_s <= 0:
            raise DeadlineExceeded("the request's time is over")
        await self._gateway.answer(
            message, emit, traceparent=self._traceparent, time_left_s=time_left_s
        )

    def _time_left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)
