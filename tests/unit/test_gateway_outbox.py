"""Between rounds and client: in order, bounded, and gone with the request."""

from __future__ import annotations

import asyncio

import pytest

from flashduet.v1 import gateway_pb2 as pb
from gateway.outbox import Outbox


def numbered(number: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[number]))


async def test_everything_is_sent_in_order_before_the_end() -> None:
    sent: list[int] = []

    async def emit(response: pb.GenerateResponse) -> None:
        await asyncio.sleep(0)
        sent.append(response.chunk.token_ids[0])

    async with Outbox(emit) as outbox:
        for number in range(100):
            await outbox.put(numbered(number))
    assert sent == list(range(100))


async def test_a_reader_that_does_not_read_stops_the_writer_after_a_few() -> None:
    reads, written = asyncio.Event(), 0

    async def emit(_: pb.GenerateResponse) -> None:
        await reads.wait()

    async def write(outbox: Outbox) -> None:
        nonlocal written
        for number in range(100):
            await outbox.put(numbered(number))
            written += 1

    async with Outbox(emit) as outbox:
        writing = asyncio.create_task(write(outbox))
        for _ in range(300):
            await asyncio.sleep(0)
        assert 1 <= written <= 20
        reads.set()
        await writing
    assert written == 100


async def test_who_waits_for_room_learns_that_sending_failed() -> None:
    async def emit(_: pb.GenerateResponse) -> None:
        await asyncio.sleep(0.01)
        raise ConnectionError("gone")

    async def request() -> None:
        async with Outbox(emit) as outbox:
            for number in range(1000):
                await outbox.put(numbered(number))

    with pytest.raises(ConnectionError):
        await request()


async def test_an_error_while_the_last_ones_are_sent_is_not_lost() -> None:
    async def emit(_: pb.GenerateResponse) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        async with Outbox(emit) as outbox:
            await outbox.put(numbered(1))


@pytest.mark.parametrize("how", ["error", "cancel"])
async def test_a_request_that_ends_early_sends_nothing_more(how: str) -> None:
    ended = asyncio.Event()

    async def emit(_: pb.GenerateResponse) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def request() -> None:
        async with Outbox(emit) as outbox:
            await outbox.put(numbered(1))
            await asyncio.sleep(0)
            if how == "error":
                raise ValueError

    running = asyncio.create_task(request())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises((ValueError, asyncio.CancelledError)):
        await running
    assert ended.is_set()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "outbox"]
