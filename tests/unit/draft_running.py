"""A draft service over real gRPC in one process, with what its tests ask of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import torch

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from flashduet import models, rpc
from flashduet.sampling.params import Sampling
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from flashduet.v1 import draft_pb2_grpc
from tests.unit.draft_peers import SECONDS, GatewayPeer, TargetPeer
from tests.unit.drafting import DraftingEngine, Sequence, engine_of, features_for

LEASE_S = 2.0
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
        return await self.stub.GetLoad(dp.DraftServiceGetLoadRequest(), timeout=SECONDS)

    async def emptied(self, seconds: float = SECONDS) -> dp.DraftServiceGetLoadResponse:
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
        # What the network drafts is what most tests compare with.
        "lookup": 0,
    }
    return DraftSettings.load(**{**fields, **changes})


@asynccontextmanager
async def served(models_folder: Path, tmp_path: Path, **changes: object) -> AsyncIterator[Running]:
    """The tiny drafter, by `settings_for` with these changes."""
    drafter, target = models_folder / "drafter", models_folder / "target"
    service = DraftService(
        settings_for(tmp_path, **{"model": str(drafter), "target_model": str(target), **changes})
    )
    await service.start()
    channel = rpc.open_channel(f"127.0.0.1:{service.port}")
    facts = models.model_facts(target, "tiny", pb.DATA_TYPE_FLOAT32)
    yield Running(service, channel, facts, engine_of(drafter, target))
    await channel.close()
    await service.stop()


@pytest.fixture
async def running(
    tiny_models: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Running]:
    """Changed by the test's own indirect parameter."""
    async with served(tiny_models, tmp_path, **getattr(request, "param", {})) as started:
        yield started


def new_id() -> bytes:
    return os.urandom(16)


def refusal(response: dp.ProposeResponse) -> str:
    assert response.WhichOneof("message") == "refused", response
    return dp.RefusalReason.Name(response.refused.reason).removeprefix("REFUSAL_REASON_")


def nack(response: dp.IngestResponse) -> tuple[str, int]:
    assert response.WhichOneof("message") == "nack", response
    return dp.NackReason.Name(response.nack.reason).removeprefix("NACK_REASON_"), response.nack.have
