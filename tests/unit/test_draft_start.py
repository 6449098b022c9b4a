"""Starting, and the handshake with targets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.checkpoint import load_drafter
from draft_service.config import DrafterConfig
from draft_service.loading import LoadedDrafter
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from flashduet import rpc
from flashduet.errors import (
    ConfigurationError,
    Conflict,
    FlashduetError,
    InvalidRequest,
    Unavailable,
)
from flashduet.models_default import shipped_drafter
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from flashduet.v1 import draft_pb2_grpc
from tests.support.tiny import MASK, tiny_target
from tests.unit.draft_peers import SECONDS, TargetPeer
from tests.unit.draft_running import (
    Running,
    new_id,
    refusal,
    running,
    settings_for,
)
from tests.unit.drafting import until

__all__ = ["running"]


async def test_attached_targets_are_told_and_forgotten(running: Running) -> None:
    async def attached() -> list[bytes]:
        request = dp.DraftServiceGetModelInfoRequest()
        return list((await running.stub.GetModelInfo(request, timeout=SECONDS)).target_instance_ids)

    assert await attached() == []
    target = await running.target()
    assert await attached() == [target.instance_id]
    await target.end()
    end = time.monotonic() + SECONDS
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
    info = await running.stub.GetModelInfo(dp.DraftServiceGetModelInfoRequest(), timeout=SECONDS)
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
        asyncio.run_coroutine_threadsafe(may_load.wait(), loop).result(SECONDS)
        return load(settings)

    service = DraftService(settings, slow_load)
    starting = asyncio.create_task(service.start())
    await asyncio.wait_for(loading.wait(), SECONDS)
    async with rpc.open_channel(f"127.0.0.1:{service.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> int:
            request = health_pb2.HealthCheckRequest(service=name)
            return (await health.Check(request, timeout=SECONDS)).status

        names = ("", "flashduet.v1.DraftService")
        for name in names:
            assert await status(name) == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(dp.DraftServiceGetLoadRequest(), timeout=SECONDS)
        assert isinstance(rpc.from_rpc_error(caught.value), Unavailable)
        may_load.set()
        await asyncio.wait_for(starting, SECONDS)
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
        may_end.wait(10 * SECONDS)
        raise ConfigurationError("never loaded")

    service = DraftService(settings_for(tmp_path), endless)
    starting = asyncio.create_task(service.start())
    await until(lambda: service.port > 0)
    starting.cancel()
    await asyncio.wait([starting], timeout=SECONDS)
    assert starting.cancelled()
    await asyncio.wait_for(service.stop(), SECONDS)
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
