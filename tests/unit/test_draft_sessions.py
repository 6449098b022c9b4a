"""The life of draft sessions: who owns them, what ends them, what others see of it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from draft_service.engine import Engine
from draft_service.work import IngestWork, ProposeWork, StepResult
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from tests.unit.draft_peers import SECONDS, TargetPeer
from tests.unit.draft_running import (
    LEASE_S,
    MAX_SESSIONS,
    Running,
    nack,
    new_id,
    refusal,
    running,
)
from tests.unit.drafting import until

__all__ = ["running"]


async def test_closing_takes_the_sessions_work_out_of_the_queue(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gateway = await running.target(), running.gateway()
    busy, closed = new_id(), new_id()
    await gateway.open(busy, target)
    await gateway.open(closed, target)
    steps: list[list[int]] = []
    may_go = threading.Event()
    whole = Engine.take

    def slow(self: Engine, ingests: list[IngestWork], proposals: list[ProposeWork]) -> StepResult:
        steps.append([work.rows for work in ingests])
        assert may_go.wait(SECONDS)
        return whole(self, ingests, proposals)

    monkeypatch.setattr(Engine, "take", slow)
    await target.chunk(busy, 0, running.features(3))
    await until(lambda: steps == [[3]])
    await target.chunk(closed, 0, running.features(50))
    await gateway.send(closed, close=dp.ProposeClose())
    assert (await gateway.receive()).HasField("closed")
    may_go.set()
    assert (await gateway.propose(busy, 4)).HasField("proposal")
    assert steps == [[3], []]


async def test_a_busy_engine_costs_a_proposal_its_budget_and_no_more(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    may_go = threading.Event()
    whole = Engine.take

    def slow(self: Engine, ingests: list[IngestWork], proposals: list[ProposeWork]) -> StepResult:
        assert may_go.wait(SECONDS)
        return whole(self, ingests, proposals)

    monkeypatch.setattr(Engine, "take", slow)
    await target.chunk(session, 0, running.features(8))
    answer = await gateway.propose(session, 9, round=1, budget_s=0.1)
    assert refusal(answer) == "CONTEXT_LATE"
    assert (await running.load()).queued_proposals == 0
    may_go.set()
    answer = await gateway.propose(session, 9, round=2)
    assert answer.proposal.round == 2
    assert (await running.load()).proposals == 1


async def test_a_cancelled_proposal_is_not_answered(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(4))
    await gateway.ask(session, 9, round=1)
    await gateway.send(session, cancel=dp.ProposeCancel(round=1))
    answer = await gateway.propose(session, 5, round=2)
    assert answer.proposal.round == 2
    assert (await running.load()).queued_proposals == 0


async def test_a_later_round_replaces_the_one_under_way(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(4))
    await gateway.ask(session, 9, round=1)
    await gateway.ask(session, 5, round=2)
    first, second = await gateway.receive(), await gateway.receive()
    assert (refusal(first), first.refused.round) == ("CONTEXT_LATE", 1)
    assert second.proposal.round == 2


async def test_a_closed_session_stays_closed(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target, epoch=1)
    features = running.features(8)
    await target.chunk(session, 0, features, epoch=1)
    await gateway.send(session, 1, close=dp.ProposeClose())
    await gateway.receive()
    assert nack(await target.chunk(session, 8, features, epoch=1)) == ("CLOSED_SESSION", 0)
    assert refusal(await gateway.open(session, target, epoch=1)) == "WRONG_EPOCH"
    assert (await running.load()).sessions == 0
    # A later epoch is a new opening, and starts empty.
    assert (await gateway.open(session, target, epoch=2)).opened.context_hit == 0
    assert nack(await target.chunk(session, 8, features, epoch=2)) == ("GAP", 0)
    # Closing twice, or what never was, is answered all the same.
    for each in (session, session, new_id()):
        await gateway.send(each, 2, close=dp.ProposeClose())
        assert (await gateway.receive()).HasField("closed")


async def test_opening_again_in_the_same_epoch_is_idempotent(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(8))
    assert (await gateway.open(session, target)).opened.context_hit == 8
    other = pb.SamplingParams(seed=9)
    assert refusal(await gateway.open(session, target, sampling=other)) == "BAD_REQUEST"
    assert (await gateway.open(session, target, epoch=1)).opened.context_hit == 0
    assert (await running.load()).sessions == 1


async def test_sessions_belong_to_the_stream_that_opened_them(running: Running) -> None:
    target, mine, theirs = await running.target(), running.gateway(), running.gateway()
    session = new_id()
    await mine.open(session, target)
    await target.chunk(session, 0, running.features(8))
    assert refusal(await theirs.propose(session, 9)) == "UNKNOWN_SESSION"
    await theirs.send(session, cancel=dp.ProposeCancel(round=1))
    assert refusal(await theirs.receive()) == "UNKNOWN_SESSION"
    await theirs.send(session, rewind=dp.ProposeRewind(length=0, new_epoch=1))
    assert refusal(await theirs.receive()) == "UNKNOWN_SESSION"
    await theirs.send(session, close=dp.ProposeClose())
    await theirs.receive()
    assert refusal(await theirs.open(session, target)) == "WRONG_EPOCH"
    other = new_id()
    await theirs.open(other, target)
    await theirs.end()
    # The other stream's end frees its sessions and none of mine.
    answer = await mine.propose(session, 9)
    assert answer.HasField("proposal")
    load = await running.load()
    assert (load.sessions, load.context_rows) == (1, 8)


@pytest.mark.parametrize("phase", ["opened", "waiting", "drafted"])
async def test_the_streams_end_frees_everything_in_every_phase(
    running: Running, phase: str
) -> None:
    target, gateway = await running.target(), running.gateway()
    for _ in range(2):
        session = new_id()
        await gateway.open(session, target)
        if phase != "opened":
            await target.chunk(session, 0, running.features(8))
        if phase == "waiting":
            await gateway.ask(session, 20)
        if phase == "drafted":
            await gateway.propose(session, 9)
    await gateway.end()
    await running.emptied()
    # The service is as good as new.
    gateway, session = running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(8))
    assert (await gateway.propose(session, 9)).HasField("proposal")


@pytest.mark.parametrize("running", [{"lease_s": LEASE_S}], indirect=True)
async def test_a_lease_ends_without_heartbeats_and_only_then(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    kept, opened, left = new_id(), new_id(), new_id()
    for session in (kept, opened, left):
        await gateway.open(session, target)
    await target.chunk(left, 0, running.features(8))
    for _ in range(6):
        await asyncio.sleep(LEASE_S / 3)
        await gateway.send(kept, heartbeat=dp.ProposeHeartbeat())
        await gateway.open(opened, target)  # any message of the gateway's keeps a session
    assert (await running.load()).sessions == 2
    await gateway.send(left, heartbeat=dp.ProposeHeartbeat())
    assert refusal(await gateway.receive()) == "UNKNOWN_SESSION"
    # A target's chunks do not keep a session that its gateway has left.
    assert nack(await target.chunk(left, 8, running.features(8))) == ("CLOSED_SESSION", 0)
    await running.emptied()


async def test_a_target_that_reconnects_goes_on_where_it_was(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    features = running.features(20)
    await target.chunk(session, 0, features[:10])
    await target.end()
    again = TargetPeer(running.channel, running.facts)
    again.instance_id = target.instance_id
    await again.handshake()
    await again.chunk(session, 10, features[10:])
    answer = await gateway.propose(session, 21)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)


async def test_one_sessions_broken_features_cost_the_others_nothing(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    broken, sound = new_id(), new_id()
    await gateway.open(broken, target)
    await gateway.open(sound, target)
    features = running.features(8)
    await target.chunk(broken, 0, torch.full_like(features, float("nan")))
    await target.chunk(sound, 0, features)
    await gateway.ask(broken, 9)
    await gateway.ask(sound, 9)
    answers = {a.session_id: a for a in [await gateway.receive(), await gateway.receive()]}
    assert refusal(answers[broken]) == "INTERNAL"
    assert list(answers[sound].proposal.token_ids) == running.drafts(features, 5, 8)


async def test_a_step_that_fails_closes_its_sessions_and_no_others(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gateway = await running.target(), running.gateway()
    hit, spared = new_id(), new_id()
    await gateway.open(hit, target)
    await gateway.open(spared, target)
    features = running.features(8)
    await target.chunk(spared, 0, features)
    assert (await gateway.propose(spared, 9)).HasField("proposal")

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_ingest", fail)
        await target.chunk(hit, 0, features)
        end = time.monotonic() + SECONDS
        while (await running.load()).sessions == 2:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
    assert nack(await target.chunk(hit, 8, features)) == ("CLOSED_SESSION", 0)
    assert refusal(await gateway.propose(hit, 9)) == "UNKNOWN_SESSION"
    await target.chunk(spared, 8, running.features(4, seed=2))
    assert (await gateway.propose(spared, 13)).HasField("proposal")


async def test_sessions_drafting_at_once_get_what_they_get_alone(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    sessions = [new_id() for _ in range(MAX_SESSIONS)]
    features = [running.features(10 + 7 * i, seed=i) for i in range(MAX_SESSIONS)]
    for session, rows in zip(sessions, features, strict=True):
        await gateway.open(session, target)
        await target.chunk(session, 0, rows)
    for round in range(1, 4):
        for i, session in enumerate(sessions):
            await gateway.ask(
                session, len(features[i]) + 1, round=round, anchor=i, block_length=4 + i
            )
        answers = [await gateway.receive() for _ in sessions]
        for answer in answers:
            i = sessions.index(answer.session_id)
            expected = running.drafts(features[i], i, 4 + i)
            assert list(answer.proposal.token_ids) == expected
