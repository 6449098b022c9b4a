"""The draft service over real gRPC in one process: what each message gets, and what it leaves."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.checkpoint import load_drafter
from draft_service.config import DrafterConfig
from draft_service.engine import Engine
from draft_service.loading import LoadedDrafter
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from draft_service.work import IngestWork, ProposeWork, StepResult
from flashduet import models, rpc
from flashduet.errors import (
    ConfigurationError,
    Conflict,
    FlashduetError,
    InvalidRequest,
    Unavailable,
)
from flashduet.models_default import shipped_drafter
from flashduet.sampling.params import Sampling
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from flashduet.v1 import draft_pb2_grpc
from tests.support.tiny import MASK, tiny_target
from tests.unit.draft_peers import GatewayPeer, TargetPeer
from tests.unit.drafting import DraftingEngine, Sequence, engine_of, features_for, until

LEASE_S = 0.6
MAX_SESSIONS = 3
MAX_ROWS = 200


@dataclass
class Running:
    """A served tiny drafter, and an engine of the same weights to compare with."""

    service: DraftService
    channel: grpc.aio.Channel
    facts: pb.ModelFacts
    reference: DraftingEngine

    @property
    def stub(self) -> draft_pb2_grpc.DraftServiceStub:
        return draft_pb2_grpc.DraftServiceStub(self.channel)

    async def target(self) -> TargetPeer:
        peer = TargetPeer(self.channel, self.facts)
        await peer.handshake()
        return peer

    def gateway(self) -> GatewayPeer:
        return GatewayPeer.on(self.channel)

    async def load(self) -> dp.DraftServiceGetLoadResponse:
        return await self.stub.GetLoad(dp.DraftServiceGetLoadRequest(), timeout=5)

    async def emptied(self, seconds: float = 5.0) -> dp.DraftServiceGetLoadResponse:
        """The load once nothing is held; the time to get there is bounded."""
        end = time.monotonic() + seconds
        while True:
            load = await self.load()
            blocks = load.context_blocks - load.free_context_blocks
            if not (load.sessions or blocks or load.queued_proposals or load.rings):
                return load
            assert time.monotonic() < end, f"still held: {load}"
            await asyncio.sleep(0.02)

    def drafts(
        self,
        features: torch.Tensor,
        anchor: int,
        block_length: int,
        sampling: Sampling | None = None,
    ) -> list[int]:
        """What a proposal over these context rows must answer."""
        sequence = Sequence.made_of(self.reference, features)
        result = self.reference.step([], [sequence.proposal(anchor, block_length, sampling)])
        self.reference.pool.close(sequence.context)
        assert result.drafts[0] is not None
        return result.drafts[0].token_ids

    def features(self, rows: int, seed: int = 0) -> torch.Tensor:
        return features_for(self.reference, rows, seed)


def settings_for(tmp_path: Path, **changes: object) -> DraftSettings:
    fields: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "transports": "inline",
        "socket_dir": tmp_path / "sockets",
        "max_sessions": MAX_SESSIONS,
        "max_context_rows": MAX_ROWS,
        "lease_s": 30.0,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "shutdown_grace_s": 0.2,
    }
    return DraftSettings.load(**{**fields, **changes})


@pytest.fixture
async def running(
    tiny_models: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Running]:
    """Started with `settings_for`, changed by the test's own indirect parameter."""
    settings = settings_for(
        tmp_path,
        model=str(tiny_models / "drafter"),
        target_model=str(tiny_models / "target"),
        **getattr(request, "param", {}),
    )
    service = DraftService(settings)
    await service.start()
    channel = rpc.open_channel(f"127.0.0.1:{service.port}")
    reference = engine_of(tiny_models / "drafter", tiny_models / "target")
    facts = models.model_facts(tiny_models / "target", "tiny", pb.DATA_TYPE_FLOAT32)
    yield Running(service, channel, facts, reference)
    await channel.close()
    await service.stop()


def new_id() -> bytes:
    return os.urandom(16)


def refusal(response: dp.ProposeResponse) -> str:
    assert response.WhichOneof("message") == "refused", response
    return dp.RefusalReason.Name(response.refused.reason).removeprefix("REFUSAL_REASON_")


def nack(response: dp.IngestResponse) -> tuple[str, int]:
    assert response.WhichOneof("message") == "nack", response
    return dp.NackReason.Name(response.nack.reason).removeprefix("NACK_REASON_"), response.nack.have


async def test_rounds_of_a_session_draft_from_all_its_context(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    opened = await gateway.open(session, target)
    assert opened.opened.context_hit == 0
    assert opened.opened.lease_ms == 30_000
    features = running.features(40)
    held = 0
    for round, rows in enumerate([16, 8, 1, 5, 8], start=1):
        ack = await target.chunk(session, held, features[held : held + rows])
        held += rows
        assert ack.ack.context_end == held
        answer = await gateway.propose(session, held + 1, round=round, anchor=round)
        assert answer.proposal.round == round
        assert list(answer.proposal.token_ids) == running.drafts(features[:held], round, 8)
        assert len(answer.proposal.confidence) == 7
        assert all(0 <= each <= 1 for each in answer.proposal.confidence)
    load = await running.load()
    assert (load.sessions, load.context_rows, load.proposals) == (1, 38, 5)
    await gateway.send(session, close=dp.ProposeClose())
    assert (await gateway.receive()).HasField("closed")
    await running.emptied()


async def test_sampled_drafts_depend_on_seed_and_choice_only(running: Running) -> None:
    target, gateway, features = await running.target(), running.gateway(), running.features(12)
    drafted = []
    for seed in (5, 5, 6):
        session = new_id()
        sampling = pb.SamplingParams(temperature=1.5, seed=seed)
        await gateway.open(session, target, sampling=sampling)
        await target.chunk(session, 0, features)
        drafted.append(list((await gateway.propose(session, 13)).proposal.token_ids))
    assert drafted[0] == drafted[1] != drafted[2]
    assert drafted[0] == running.drafts(features, 5, 8, Sampling(temperature=1.5, seed=5))


async def test_a_proposal_waits_for_its_context_and_holds_up_nobody(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    early, other = new_id(), new_id()
    await gateway.open(early, target)
    await gateway.open(other, target)
    features = running.features(20)
    await target.chunk(early, 0, features[:10])
    await gateway.ask(early, 21, round=3)
    await asyncio.sleep(0.1)
    assert (await running.load()).queued_proposals == 1
    # Meanwhile another session of the same stream is answered.
    await target.chunk(other, 0, features)
    answer = await gateway.propose(other, 21, round=9)
    assert (answer.session_id, answer.proposal.round) == (other, 9)
    await target.chunk(early, 10, features[10:])
    answer = await gateway.receive()
    assert (answer.session_id, answer.proposal.round) == (early, 3)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)
    assert answer.proposal.timings.context_wait_us > 50_000


async def test_a_proposal_whose_context_does_not_come_is_refused(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(4))
    began = time.monotonic()
    answer = await gateway.propose(session, 10, round=2, budget_s=0.15)
    assert refusal(answer) == "CONTEXT_LATE"
    assert (answer.refused.round, answer.refused.context_end) == (2, 4)
    assert 0.1 < time.monotonic() - began < 2.0
    # The session is as good as before.
    assert (await gateway.propose(session, 5)).HasField("proposal")
    counts = {c.reason: c.count for c in (await running.load()).refused_proposals}
    assert counts == {"CONTEXT_LATE": 1}


async def test_what_is_refused_and_why(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(8))
    expected = {
        "BEHIND_CONTEXT": gateway.propose(session, 5),
        "WRONG_EPOCH": gateway.propose(session, 9, epoch=4),
        "UNKNOWN_SESSION": gateway.propose(new_id(), 9),
    }
    for reason, call in expected.items():
        answer = await call
        assert refusal(answer) == reason
    for wrong in ({"block_length": 1}, {"block_length": 33}, {"anchor": 320}):
        assert refusal(await gateway.propose(session, 9, **wrong)) == "BAD_REQUEST"
    assert refusal(await gateway.propose(session, 0)) == "BAD_REQUEST"
    await gateway.send(session)
    assert refusal(await gateway.receive()) == "BAD_REQUEST"
    bad = pb.SamplingParams(top_p=1.5)
    answer = await gateway.open(new_id(), target, sampling=bad)
    assert refusal(answer) == "BAD_REQUEST"
    assert "sampling.top_p" in answer.refused.detail
    assert refusal(await gateway.open(b"short", target)) == "BAD_REQUEST"
    stranger = TargetPeer(running.channel, running.facts)
    assert refusal(await gateway.open(new_id(), stranger)) == "UNKNOWN_TARGET"
    for _ in range(MAX_SESSIONS - 1):
        await gateway.open(new_id(), target)
    assert refusal(await gateway.open(new_id(), target)) == "TOO_MANY_SESSIONS"
    # After all that the session still drafts.
    assert (await gateway.propose(session, 9)).HasField("proposal")


async def test_chunks_that_do_not_fit_are_refused_counted_and_change_nothing(
    running: Running,
) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    features = running.features(30)
    await target.chunk(session, 0, features[:10])
    assert nack(await target.chunk(session, 12, features[:4])) == ("GAP", 10)
    assert nack(await target.chunk(session, 0, features[:10])) == ("GAP", 10)  # a retry
    assert nack(await target.chunk(session, 10, features[:4], epoch=1)) == ("WRONG_EPOCH", 10)
    assert nack(await target.chunk(new_id(), 0, features[:4])) == ("UNKNOWN_SESSION", 0)
    assert nack(await target.chunk(session, 10, features[:4], token_ids=[1]))[0] == "WRONG_SHAPE"
    assert nack(await target.chunk(session, 10, features[:4], token_ids=[]))[0] == "WRONG_SHAPE"
    narrow = await target.chunk(session, 10, features[:4, :-1].contiguous())
    assert nack(narrow) == ("WRONG_SHAPE", 10)
    payload = pb.TensorPayload(data_type=99, shape=[2, features.shape[1]], inline=b"xx")
    wrong = await target.chunk(session, 10, features[:2], features=payload)
    assert nack(wrong) == ("BAD_DATA_TYPE", 10)
    payload = pb.TensorPayload(data_type=pb.DATA_TYPE_FLOAT32, shape=[2, features.shape[1]])
    payload.inline = b"too few"
    wrong = await target.chunk(session, 10, features[:2], features=payload)
    assert nack(wrong) == ("WRONG_SIZE", 10)
    payload.ring.offset = 0
    wrong = await target.chunk(session, 10, features[:2], features=payload)
    assert nack(wrong) == ("WRONG_TRANSPORT", 10)
    other = await running.target()
    assert nack(await other.chunk(session, 10, features[:4])) == ("WRONG_TARGET", 0)
    counts = {c.reason: c.count for c in (await running.load()).refused_chunks}
    assert counts == {
        "BAD_DATA_TYPE": 1,
        "GAP": 2,
        "UNKNOWN_SESSION": 1,
        "WRONG_EPOCH": 1,
        "WRONG_SHAPE": 3,
        "WRONG_SIZE": 1,
        "WRONG_TARGET": 1,
        "WRONG_TRANSPORT": 1,
    }
    await target.chunk(session, 10, features[10:])
    answer = await gateway.propose(session, 31)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)


async def test_a_full_context_store_refuses_chunks_and_frees_on_close(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    first, second = new_id(), new_id()
    await gateway.open(first, target)
    await gateway.open(second, target)
    features = running.features(MAX_ROWS)
    assert (await target.chunk(first, 0, features[:150])).HasField("ack")
    assert nack(await target.chunk(second, 0, features[:60])) == ("NO_ROOM", 0)
    assert (await gateway.propose(first, 151)).HasField("proposal")
    await gateway.send(first, close=dp.ProposeClose())
    await gateway.receive()
    assert (await target.chunk(second, 0, features[:60])).HasField("ack")


async def test_rewind_cuts_the_context_and_moves_the_epoch(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    features = running.features(30)
    await target.chunk(session, 0, features[:20])
    await gateway.send(session, rewind=dp.ProposeRewind(length=12, new_epoch=2))
    answer = await gateway.receive()
    assert (answer.epoch, answer.rewound.context_end) == (2, 12)
    assert nack(await target.chunk(session, 20, features[20:])) == ("WRONG_EPOCH", 12)
    await target.chunk(session, 12, features[12:30], epoch=2)
    answer = await gateway.propose(session, 31, epoch=2)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)
    # Back by more than the last chunk, then other rows than before.
    await gateway.send(session, 2, rewind=dp.ProposeRewind(length=5, new_epoch=3))
    assert (await gateway.receive()).rewound.context_end == 5
    changed = torch.cat([features[:5], running.features(9, seed=8)])
    await target.chunk(session, 5, changed[5:], epoch=3)
    answer = await gateway.propose(session, 15, epoch=3)
    assert list(answer.proposal.token_ids) == running.drafts(changed, 5, 8)
    # Not forwards, and not into an epoch that is over.
    await gateway.send(session, 3, rewind=dp.ProposeRewind(length=99, new_epoch=4))
    assert (await gateway.receive()).rewound.context_end == 14
    await gateway.send(session, 4, rewind=dp.ProposeRewind(length=1, new_epoch=4))
    assert refusal(await gateway.receive()) == "WRONG_EPOCH"


async def test_a_rewind_ends_the_proposal_under_way(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    features = running.features(12)
    await target.chunk(session, 0, features[:4])
    await gateway.ask(session, 9, round=1)
    await gateway.send(session, rewind=dp.ProposeRewind(length=3, new_epoch=1))
    ended, rewound = await gateway.receive(), await gateway.receive()
    assert (refusal(ended), ended.refused.round) == ("WRONG_EPOCH", 1)
    assert rewound.rewound.context_end == 3
    # Rows that come for the new epoch wake nobody from the old one.
    await target.chunk(session, 3, features[3:8], epoch=1)
    answer = await gateway.propose(session, 9, epoch=1, round=2)
    assert answer.proposal.round == 2
    assert list(answer.proposal.token_ids) == running.drafts(features[:8], 5, 8)


async def test_closing_takes_the_sessions_work_out_of_the_queue(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gateway = await running.target(), running.gateway()
    busy, closed = new_id(), new_id()
    await gateway.open(busy, target)
    await gateway.open(closed, target)
    steps: list[list[int]] = []
    may_go = threading.Event()
    whole = Engine.step

    def slow(self: Engine, ingests: list[IngestWork], proposals: list[ProposeWork]) -> StepResult:
        steps.append([work.rows for work in ingests])
        assert may_go.wait(10)
        return whole(self, ingests, proposals)

    monkeypatch.setattr(Engine, "step", slow)
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
    whole = Engine.step

    def slow(self: Engine, ingests: list[IngestWork], proposals: list[ProposeWork]) -> StepResult:
        assert may_go.wait(10)
        return whole(self, ingests, proposals)

    monkeypatch.setattr(Engine, "step", slow)
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


async def test_attached_targets_are_told_and_forgotten(running: Running) -> None:
    async def attached() -> list[bytes]:
        request = dp.DraftServiceGetModelInfoRequest()
        return list((await running.stub.GetModelInfo(request, timeout=5)).target_instance_ids)

    assert await attached() == []
    target = await running.target()
    assert await attached() == [target.instance_id]
    await target.end()
    end = time.monotonic() + 5
    while await attached():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    gateway = running.gateway()
    assert refusal(await gateway.open(new_id(), target)) == "UNKNOWN_TARGET"


async def test_the_handshake_says_what_the_target_must_send(running: Running) -> None:
    peer = TargetPeer(running.channel, running.facts)
    welcome = await peer.handshake()
    assert list(welcome.target_layer_ids) == [0, 2, 2]
    assert welcome.block_length == 8
    assert welcome.draft_instance_id == running.service.instance_id
    info = await running.stub.GetModelInfo(dp.DraftServiceGetModelInfoRequest(), timeout=5)
    assert info.instance_id == running.service.instance_id
    assert (info.mask_token_id, info.max_block_length, info.block_length) == (MASK, 32, 8)
    assert info.target_facts.tokenizer_hash == running.facts.tokenizer_hash


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("hidden_size", 65, "hidden size"),
        ("num_layers", 5, "number of layers"),
        ("vocab_size", 321, "vocabulary size"),
        ("tokenizer_hash", "0" * 64, "tokenizer hash"),
    ],
)
async def test_a_target_of_another_kind_is_refused_by_name(
    running: Running, field: str, value: object, named: str
) -> None:
    facts = pb.ModelFacts()
    facts.CopyFrom(running.facts)
    facts.name = "other-model"
    setattr(facts, field, value)
    peer = TargetPeer(running.channel, facts)
    await peer.send(peer.hello())
    error = await peer.failure()
    assert isinstance(error, Conflict)
    assert named in error.message
    assert str(value) in error.message
    assert "other-model" in error.message
    assert "FLASHDUET_DRAFT_" in error.message


async def test_handshakes_out_of_order_are_refused(running: Running) -> None:
    async def fails(*requests: dp.IngestRequest) -> FlashduetError:
        peer = TargetPeer(running.channel, running.facts)
        for request in requests[:-1]:
            await peer.send(request)
            await peer.receive()
        await peer.send(requests[-1])
        return await peer.failure()

    hello = TargetPeer(running.channel, running.facts).hello
    attach = dp.IngestRequest(attach=dp.IngestAttach(transport=pb.TRANSPORT_INLINE))
    ring = dp.IngestRequest(attach=dp.IngestAttach(transport=pb.TRANSPORT_MEMFD))
    assert isinstance(await fails(attach), InvalidRequest)
    assert isinstance(await fails(dp.IngestRequest(chunk=dp.IngestChunk())), InvalidRequest)
    assert isinstance(await fails(hello(), hello()), InvalidRequest)
    assert isinstance(await fails(hello(), attach, hello()), InvalidRequest)
    assert isinstance(await fails(hello(target_instance_id=b"x")), InvalidRequest)
    error = await fails(hello(protocol_version=99))
    assert isinstance(error, Conflict)
    assert "99" in error.message
    assert "memfd" in (await fails(hello(offers=[pb.TRANSPORT_MEMFD]))).message
    assert isinstance(await fails(hello(), ring), Conflict)
    await running.emptied()
    assert not running.service.loaded.coordinator.targets  # type: ignore[union-attr]


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
        end = time.monotonic() + 5
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


async def test_not_serving_and_unavailable_until_warmed_up(
    tiny_models: Path, tmp_path: Path
) -> None:
    may_load, loading = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    settings = settings_for(
        tmp_path, model=str(tiny_models / "drafter"), target_model=str(tiny_models / "target")
    )

    def slow_load(settings: DraftSettings) -> LoadedDrafter:
        from draft_service.loading import load

        loop.call_soon_threadsafe(loading.set)
        asyncio.run_coroutine_threadsafe(may_load.wait(), loop).result(10)
        return load(settings)

    service = DraftService(settings, slow_load)
    starting = asyncio.create_task(service.start())
    await asyncio.wait_for(loading.wait(), 10)
    async with rpc.open_channel(f"127.0.0.1:{service.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> int:
            request = health_pb2.HealthCheckRequest(service=name)
            return (await health.Check(request, timeout=5)).status

        names = ("", "flashduet.v1.DraftService")
        for name in names:
            assert await status(name) == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(dp.DraftServiceGetLoadRequest(), timeout=5)
        assert isinstance(rpc.from_rpc_error(caught.value), Unavailable)
        may_load.set()
        await asyncio.wait_for(starting, 20)
        for name in names:
            assert await status(name) == health_pb2.HealthCheckResponse.SERVING
    await service.stop()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda:7"}, "FLASHDUET_DRAFT_DEVICE: 'cuda:7' asked for"),
        ({"device": "toaster"}, "FLASHDUET_DRAFT_DEVICE: 'toaster' is no device"),
        ({"target_model": "{deeper}"}, "number of layers: the drafter expects 4, the target has 5"),
        ({"model": "{target}"}, "expected DFlashDraftModel, found LlamaForCausalLM"),
        ({"listen": "{taken}"}, "cannot listen on"),
        ({"transports": "cuda_ipc"}, "cuda_ipc cannot be had"),
    ],
)
async def test_what_cannot_be_had_is_an_error_at_start(
    tiny_models: Path, tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    deeper = tiny_target(tmp_path / "deeper", "llama", num_hidden_layers=5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {
            "deeper": str(deeper),
            "target": str(tiny_models / "target"),
            "taken": f"127.0.0.1:{taken.getsockname()[1]}",
        }
        settings = {"model": str(tiny_models / "drafter"), "target_model": places["target"]}
        settings |= {name: value.format(**places) for name, value in changes.items()}
        service = DraftService(settings_for(tmp_path, **settings))
        with pytest.raises((ConfigurationError, Conflict)) as caught:
            await service.start()
        await service.stop()
    assert words in str(caught.value)


async def test_a_service_that_is_told_to_end_does_not_wait_for_its_weights(
    tmp_path: Path,
) -> None:
    may_end = threading.Event()

    def endless(settings: DraftSettings) -> LoadedDrafter:
        may_end.wait(30)
        raise ConfigurationError("never loaded")

    service = DraftService(settings_for(tmp_path), endless)
    starting = asyncio.create_task(service.start())
    await until(lambda: service.port > 0)
    starting.cancel()
    await asyncio.wait([starting], timeout=2)
    assert starting.cancelled()
    await asyncio.wait_for(service.stop(), 2)
    may_end.set()


def test_the_shipped_drafter_is_a_valid_checkpoint() -> None:
    folder = shipped_drafter()
    config = DrafterConfig.load(folder)
    load_drafter(folder)
    assert (config.hidden_size, config.num_target_layers) == (576, 30)


def test_the_servicer_answers_every_call_of_the_contract() -> None:
    from draft_service.server import DraftServicer

    methods = [n for n in vars(draft_pb2_grpc.DraftServiceServicer) if not n.startswith("_")]
    assert all(name in vars(DraftServicer) for name in methods)
