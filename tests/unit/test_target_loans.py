"""Records that the draft says are lent: the target leaves them alone until they are named."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashduet.transport.base import LENT_RECORDS
from flashduet.v1 import draft_pb2
from tests.unit import target_server_support
from tests.unit.target_server_support import IngestPeer, eventually, running_peer, running_target
from tests.unit.target_support import load_tiny, prompt

LAYERS = (0, 2, 3)


class LendingPeer(IngestPeer):
    """A draft that reads in the ring. Sequences in `to_release` are named by its next answer."""

    lends = True
    capabilities: tuple[str, ...] = ()
    to_release: tuple[int, ...] = ()

    async def Ingest(self, requests: Any, context: Any) -> None:
        async def read() -> Any:
            request = await context.read()
            if isinstance(request, draft_pb2.IngestRequest) and request.HasField("hello"):
                self.capabilities = tuple(request.hello.capabilities)
            return request

        await super().Ingest(requests, SimpleNamespace(read=read, write=context.write))

    def _take(self, chunk: draft_pb2.IngestChunk, receiver: Any, width: int) -> Any:
        response = super()._take(chunk, receiver, width)
        response.ack.lent = self.lends
        response.released.extend(self.to_release)
        self.to_release = ()
        return response


async def test_lent_records_are_kept_until_they_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    tiny = load_tiny(tmp_path / "qwen3", "qwen3")
    monkeypatch.setattr(target_server_support, "IngestPeer", LendingPeer)
    async with (
        running_peer(tmp_path, LAYERS) as (peer, endpoint),
        running_target(tiny, tmp_path, drafts=endpoint) as running,
    ):
        assert isinstance(peer, LendingPeer)
        await running.attached()
        assert peer.capabilities == (LENT_RECORDS,)
        session_id, stream = os.urandom(16), running.decode()
        await stream.open(prompt(40), session_id=session_id, draft_instance_id=peer.instance_id)
        for _ in range(5):
            assert (await stream.verify()).drafting

        async def all_taken() -> bool:
            # The last rows follow their answer.
            return len(peer.token_ids[session_id]) == len(stream.tokens) - 1

        await eventually(all_taken)
        await stream.close()
        lent = (await running.load()).ring_records
        assert lent >= 5, "every chunk was acknowledged, and none released"
        peer.lends, peer.to_release = False, tuple(range(1, lent + 1))
        again = running.decode()
        await again.open(prompt(40), draft_instance_id=peer.instance_id)
        await again.close()
        await running.nothing_left()
