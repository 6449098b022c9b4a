"""Chunks that the draft reads in the ring: answered at once, released when their rows are in."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draft_service.engine import Engine
from draft_service.service import DraftService
from draft_service.work import IngestWork, ProposeWork, StepResult
from flashduet import models, rpc
from flashduet.transport import loans
from flashduet.transport.base import LENT_RECORDS, FeatureSender
from flashduet.transport.negotiation import open_sender
from flashduet.transport.options import TransportOptions
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from tests.unit.draft_peers import TargetPeer
from tests.unit.draft_running import Running, new_id, refusal, settings_for
from tests.unit.drafting import engine_of, until


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose name leaves room for a Unix socket's: pytest's own are too long."""
    with tempfile.TemporaryDirectory(prefix="fd") as folder:
        yield Path(folder)


@pytest.fixture
async def running(
    tiny_models: Path, tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    monkeypatch.setattr(loans, "LEAST_LENT_BYTES", 1)  # a tiny drafter's chunks are small
    settings = settings_for(
        tmp_path,
        model=str(tiny_models / "drafter"),
        target_model=str(tiny_models / "target"),
        transports="memfd",
        socket_dir=sockets,
    )
    service = DraftService(settings)
    await service.start()
    channel = rpc.open_channel(f"127.0.0.1:{service.port}")
    facts = models.model_facts(tiny_models / "target", "tiny", pb.DATA_TYPE_FLOAT32)
    reference = engine_of(tiny_models / "drafter", tiny_models / "target")
    yield Running(service, channel, facts, reference)
    await channel.close()
    await service.stop()


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
    await target.send(target.hello(offers=[pb.TRANSPORT_MEMFD], capabilities=capabilities))
    welcome = (await target.receive()).welcome
    options = TransportOptions("memfd", "cpu", sockets, ring_bytes=1 << 20)
    target.sender, attach = await open_sender(welcome.accepted, welcome.draft_instance_id, options)
    await target.send(dp.IngestRequest(attach=attach))
    assert (await target.receive()).HasField("attached")
    yield target
    await target.end()
    target.sender.close()


class HeldUp:
    """The engine's steps wait until they may go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.may_go = threading.Event()
        whole = Engine.step

        def step(
            engine: Engine, ingests: list[IngestWork], proposals: list[ProposeWork]
        ) -> StepResult:
            self.steps += 1
            assert self.may_go.wait(30)
            return whole(engine, ingests, proposals)

        monkeypatch.setattr(Engine, "step", step)


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
    def rings() -> int:
        return Path("/proc/self/maps").read_text().count("flashduet-ring")

    engine, gateway = HeldUp(monkeypatch), running.gateway()
    session, features, before = new_id(), running.features(20), rings()
    async with lender(running, sockets, LENT_RECORDS) as target:
        await gateway.open(session, target)
        assert (await target.lend(session, 0, features, 20)).ack.lent
        await until(lambda: engine.steps == 1)
    assert rings() == before + 1
    engine.may_go.set()
    drafted = await gateway.propose(session, 21)
    assert list(drafted.proposal.token_ids) == running.drafts(features, 5, 8)
    await gateway.end()
    await running.emptied()
    await until(lambda: rings() == before)
