"""Hypothesis as a source of many examples, which are sent several at once from one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

T = TypeVar("T")
# Requests of one Hypothesis example: more make it discard examples as too large.
_BATCH = 16
_BATCH_S = 300.0
_BATCHES_UNDER_WAY = 3


class Runner:
    """Owns the event loop, in a thread: Hypothesis draws the next batch while one is answered."""

    def __init__(self, at_once: int) -> None:
        """`at_once`: connections, each with one request under way at a time."""
        self.at_once = at_once
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def start(self, work: Awaitable[Any]) -> Future[Any]:
        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def for_each_batch(
    runner: Runner,
    strategy: st.SearchStrategy[T],
    count: int,
    seed: int,
    send: Callable[[list[T]], Awaitable[None]],
) -> None:
    """Send `count` examples of the strategy, always the same ones for a seed."""
    under_way: deque[Future[None]] = deque()
    left = count

    def some(examples: list[T]) -> None:
        nonlocal left
        wanted, left = examples[:left], max(0, left - len(examples))
        if wanted:
            under_way.append(runner.start(send(wanted)))
        while len(under_way) > _BATCHES_UNDER_WAY:
            under_way.popleft().result(_BATCH_S)

    while left:  # Hypothesis may discard some of what it draws
        draw = given(st.lists(strategy, min_size=_BATCH, max_size=_BATCH))(some)
        chosen = settings(
            max_examples=-(-left // _BATCH),
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(seed)(chosen(draw))()
        seed += 1
    for one in under_way:
        one.result(_BATCH_S)
