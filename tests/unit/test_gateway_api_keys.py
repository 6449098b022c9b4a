"""Keys: where they come from, who passes, and that nothing of them shows."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flashduet import rpc
from flashduet.client import AsyncClient
from flashduet.errors import ConfigurationError, Unauthenticated
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.gateway_pb2_grpc import GatewayServiceServicer, GatewayServiceStub
from flashduet.v1.gateway_pb2_grpc import add_GatewayServiceServicer_to_server as add_to_server
from gateway.api_keys import ApiKeys, RequireApiKey
from gateway.settings import GatewaySettings


def load(**settings: object) -> ApiKeys:
    return ApiKeys.load(GatewaySettings.load(**settings))


def test_without_keys_everyone_passes() -> None:
    keys = load()
    assert not keys.required
    keys.check(None)


def test_keys_come_from_the_environment_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the other team\nsk-three\n\n  sk-four  \n")
    monkeypatch.setenv("FLASHDUET_GATEWAY_API_KEYS", "sk-one, sk-two")
    monkeypatch.setenv("FLASHDUET_GATEWAY_API_KEYS_FILE", str(file))
    keys = load()
    for key in ("sk-one", "sk-two", "sk-three", "sk-four"):
        keys.check(f"Bearer {key}")
        keys.check(f"bearer {key}")
    wrong: tuple[str | None, ...] = (None, "", "sk-one", "Basic sk-one", "Bearer", "Bearer sk-on")
    wrong += ("Bearer sk-one2", "Bearer # of the other team", "Bearer sk-one,sk-two")
    for shown in (*wrong, "Bearer \udcff"):
        with pytest.raises(Unauthenticated) as refused:
            keys.check(shown)
        assert "sk-" not in refused.value.message


def test_a_configuration_without_usable_keys_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for settings in (
        {"api_keys": " , "},
        {"api_keys": "sk-ünicode"},
        {"api_keys": "two words"},
        {"api_keys_file": empty},
        {"api_keys_file": tmp_path / "none"},
    ):
        with pytest.raises(ConfigurationError, match="FLASHDUET_GATEWAY_API_KEYS"):
            load(**settings)


def test_keys_are_masked_where_settings_are_printed() -> None:
    settings = GatewaySettings.load(api_keys="sk-secret")
    assert "sk-secret" not in settings.describe() + repr(settings)


class Models(GatewayServiceServicer):
    async def ListModels(
        self, request: pb.ListModelsRequest, context: object
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.ServedModel(id="toy")])

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await context.write(
            pb.GenerateResponse(started=pb.GenerateStarted(request_id="req-1", model="toy"))
        )
        finish_reason = pb.FINISH_REASON_STOP
        await context.write(
            pb.GenerateResponse(finished=pb.GenerateFinished(finish_reason=finish_reason))
        )
        await context.write(
            pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=finish_reason))
        )


async def test_grpc_methods_ask_for_a_key_and_health_does_not() -> None:
    server = rpc.Server(["x"], [RequireApiKey(load(api_keys="sk-one"))])
    add_to_server(Models(), server.grpc)
    await server.start("127.0.0.1:0")
    right = (("authorization", "Bearer sk-one"),)
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = GatewayServiceStub(channel)
        for metadata in ((), (("authorization", "Bearer sk-two"),), (("authorization-bin", b"x"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(pb.GenerateRequest(), metadata=metadata).read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(rpc.from_rpc_error(refused.value), Unauthenticated)
        assert (await stub.ListModels(pb.ListModelsRequest(), metadata=right)).models[0].id == "toy"
        assert await stub.Generate(pb.GenerateRequest(), metadata=right).read()
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(service=""))
    await server.stop(0)


async def test_our_own_clients_show_the_environment_s_key(monkeypatch: pytest.MonkeyPatch) -> None:
    server = rpc.Server(["x"], [RequireApiKey(load(api_keys="sk-one,sk-two"))])
    add_to_server(Models(), server.grpc)
    await server.start("127.0.0.1:0")
    endpoint = f"127.0.0.1:{server.port}"

    async def served(**key: str) -> str:
        async with AsyncClient(endpoint, **key) as client:
            (model,) = await client.models()
            assert (await client.generate("a").result()).request_id == "req-1"
        return model.id

    assert await served(api_key="sk-two") == "toy"
    with pytest.raises(Unauthenticated):
        await served()
    monkeypatch.setenv("FLASHDUET_GATEWAY_API_KEYS", "sk-one,sk-two")
    assert await served() == "toy"
    monkeypatch.setenv("FLASHDUET_API_KEY", "sk-three")
    with pytest.raises(Unauthenticated):
        await served()
    await server.stop(0)
