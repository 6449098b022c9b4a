"""Chunks that the draft reads in the ring: answered at once, released when their rows are in."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draft_service.engine import Engine
from draft_service.work import IngestWork, ProposeWork, StepResult
from flashduet.transport import loans
from flashduet.transport.base import LENT_RECORDS, FeatureSender
from flashduet.v1 import draft_pb2 as dp
from tests.support.rings import mappings
from tests.unit.draft_peers import TargetPeer
from tests.unit.draft_rings import hand_ring_over, running, sockets
from tests.unit.draft_running import Running, new_id, refusal
from tests.unit.drafting import until

__all__ = ["running", "sockets"]


@pytest.fixture(autouse=True)
def small_loans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny drafter's chunks are small."""
    monkeypatch.setattr(loans, "LEAST_LENT_BYTES", 1)


class Lender(TargetPeer):
    """A target whose sender the test can see; it releases nothing by itself."""

    sender: FeatureSender
    number = 0

    async def lend(
        self, session: bytes, base: int, features: object, rows: int
    ) -> dp.IngestResponse:
        """Send rows and return the first answer."""
        self.number += 1
        payload = self.sender.put(self.number, session, 0, base, features)  # type: ignore[arg-type]
        chunk = dp.IngestChunk(
            session_id=session,
            base=base,
            token_ids=[7] * rows,
            features=payload,
            sequence=self.number,
        )
        await self.send(dp.IngestRequest(chunk=chunk))
        return await self.receive()


@asynccontextmanager
async def lender(running: Running, sockets: Path, *capabilities: str) -> AsyncIterator[Lender]:
    target = Lender(running.channel, running.facts)
    target.sender = await hand_ring_over(target, sockets, capabilities=capabilities)
    yield target
    await target.end()
    target.sender.close()


class HeldUp:
    """The engine's steps wait until they may go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.may_go = threading.Event()
        whole = Engine.take

        def step(
            engine: Engine, ingests: list[IngestWork], proposals: list[ProposeWork]
        ) -> StepResult:
            self.steps += 1
            assert self.may_go.wait(30)
            return whole(engine, ingests, proposals)

        monkeypatch.setattr(Engine, "take", step)


async def test_lent_chunks_are_acknowledged_at_once_and_released_once_they_are_read(
    running: Running, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, features, session = HeldUp(monkeypatch), running.features(40), new_id()
    gateway = running.gateway()
    async with lender(running, sockets, LENT_RECORDS) as target:
        await gateway.open(session, target)
        for number, base in enumerate(range(0, 40, 20), 1):
            answer = await target.lend(session, base, features[base : base + 20], 20)
            assert (answer.ack.sequence, answer.ack.context_end) == (number, base + 20)
            assert answer.ack.lent
            assert not answer.released
        engine.may_go.set()
        released: list[int] = []
        while len(released) < 2:
            answer = await target.receive()  # no chunk is needed for it
            assert answer.WhichOneof("message") is None
            released += answer.released
        assert sorted(released) == [1, 2]
        drafted = await gateway.propose(session, 41)
        assert list(drafted.proposal.token_ids) == running.drafts(features, 5, 8)
        # The next answer has nothing to add, and the stream goes on as before.
        answer = await target.lend(session, 40, features[:4], 4)
        assert answer.ack.context_end == 44
        assert not answer.released
    await gateway.end()
    await running.emptied()


async def test_a_target_that_knows_nothing_of_loans_gets_copies(
    running: Running, sockets: Path
) -> None:
    gateway, session = running.gateway(), new_id()
    async with lender(running, sockets) as target:
        await gateway.open(session, target)
        answer = await target.lend(session, 0, running.features(20), 20)
        assert answer.ack.context_end == 20
        assert not answer.ack.lent
    await gateway.end()
    await running.emptied()


async def test_a_record_replaced_while_it_is_read_costs_its_session(
    running: Running, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, session, other = HeldUp(monkeypatch), new_id(), new_id()
    gateway = running.gateway()
    async with lender(running, sockets, LENT_RECORDS) as target:
        await gateway.open(session, target)
        await gateway.open(other, target)
        answer = await target.lend(session, 0, running.features(20), 20)
        assert answer.ack.lent
        await until(lambda: engine.steps == 1)
        target.sender.release(1)  # the target breaks its word
        answer = await target.lend(other, 0, running.features(20, seed=1), 20)
        assert answer.ack.context_end == 20
        engine.may_go.set()
        refused = await gateway.propose(session, 21)
        assert refusal(refused) == "UNKNOWN_SESSION"
        drafted = await gateway.propose(other, 21)
        expected = running.drafts(running.features(20, seed=1), 5, 8)
        assert list(drafted.proposal.token_ids) == expected
    await gateway.end()
    await running.emptied()


async def test_sessions_that_end_while_their_chunks_are_lent_give_them_back(
    running: Running, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gateway = HeldUp(monkeypatch), running.gateway()
    sessions = [new_id(), new_id()]
    async with lender(running, sockets, LENT_RECORDS) as target:
        for session in sessions:
            await gateway.open(session, target)
            answer = await target.lend(session, 0, running.features(20), 20)
            assert answer.ack.lent
        await until(lambda: engine.steps == 1)
        for session in sessions:  # one is being read, one is queued
            await gateway.send(session, close=dp.ProposeClose())
            assert (await gateway.receive()).HasField("closed")
        engine.may_go.set()
        released: list[int] = []
        while len(released) < 2:
            released += (await target.receive()).released
        assert sorted(released) == [1, 2]
    await gateway.end()
    await running.emptied()


async def test_a_target_that_dies_takes_its_ring_with_it_once_it_is_read(
    running: Running, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gateway = HeldUp(monkeypatch), running.gateway()
    session, features, before = new_id(), running.features(20), mappings()
    async with lender(running, sockets, LENT_RECORDS) as target:
        await gateway.open(session, target)
        assert (await target.lend(session, 0, features, 20)).ack.lent
        await until(lambda: engine.steps == 1)
    assert mappings() == before + 1
    engine.may_go.set()
    drafted = await gateway.propose(session, 21)
    assert list(drafted.proposal.token_ids) == running.drafts(features, 5, 8)
    await gateway.end()
    await running.emptied()
    await until(lambda: mappings() == before)
