"""Errors cross the wire with their status, their fields and their retry time; health is true."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flashduet import errors, rpc
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc, target_pb2, target_pb2_grpc

CASES = [
    (errors.InvalidRequest("sampling.top_p", 1.5, "must be in (0, 1]"), "INVALID_ARGUMENT", 400),
    (errors.Overloaded("no session is free", retry_after_s=2.5), "RESOURCE_EXHAUSTED", 429),
    (errors.DeadlineExceeded("deadline passed"), "DEADLINE_EXCEEDED", 504),
    (errors.Unavailable("no target", retry_after_s=0.5), "UNAVAILABLE", 503),
    (errors.Conflict("round 3 is over"), "FAILED_PRECONDITION", 409),
    (errors.FlashduetError("ours"), "INTERNAL", 500),
]


class Raiser(gateway_pb2_grpc.GatewayServiceServicer):
    error: errors.FlashduetError

    async def ListModels(self, request, context):
        await rpc.abort(context, self.error)


@pytest.fixture
async def server() -> AsyncIterator[tuple[rpc.Server, Raiser]]:
    running, servicer = rpc.Server(["flashduet.v1.GatewayService"]), Raiser()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, running.grpc)
    await running.start("127.0.0.1:0")
    yield running, servicer
    await running.stop(0)


@pytest.mark.parametrize(("error", "status", "http"), CASES)
async def test_an_error_survives_the_wire(server, error, status, http):
    running, servicer = server
    servicer.error = error
    async with rpc.open_channel(f"127.0.0.1:{running.port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode[status]
    rebuilt = rpc.from_rpc_error(caught.value)
    assert rebuilt.message == error.message
    assert rebuilt.grpc_status == status
    assert rebuilt.http_status == http
    assert rebuilt.retry_after_s == error.retry_after_s
    assert rebuilt.violations == error.violations


async def test_a_server_is_not_serving_until_it_says_so(server):
    running, _ = server
    async with rpc.open_channel(f"127.0.0.1:{running.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "flashduet.v1.GatewayService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await running.serving()
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_taken_port_is_an_error_that_names_the_variable(server):
    running, _ = server
    second = rpc.Server(["flashduet.v1.GatewayService"])
    with pytest.raises(errors.ConfigurationError, match="LISTEN"):
        await second.start(f"127.0.0.1:{running.port}")
    await second.stop(0)


class Broken(target_pb2_grpc.TargetServiceServicer, gateway_pb2_grpc.GatewayServiceServicer):
    """Every kind of method that our servicers have, each with a mistake in it."""

    async def ListModels(self, request, context):
        raise NameError("name 'secret_name' is not defined")

    async def Generate(self, request, context):
        await context.write(gateway_pb2.GenerateResponse())
        raise KeyError("secret_name")

    async def Decode(self, requests, context):
        await context.read()
        raise RuntimeError("secret_name")


class BrokenGenerator(gateway_pb2_grpc.GatewayServiceServicer):
    async def Generate(self, request, context):
        yield gateway_pb2.GenerateResponse()
        raise KeyError("secret_name")

    async def ListModels(self, request, context):
        raise errors.Overloaded("all are taken", 2.5)


@contextlib.asynccontextmanager
async def serving(servicer: object) -> AsyncIterator[grpc.aio.Channel]:
    server = rpc.Server([])
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server.grpc)
    if isinstance(servicer, target_pb2_grpc.TargetServiceServicer):
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    await server.start("127.0.0.1:0")
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop(0)


async def _list_models(channel):
    await gateway_pb2_grpc.GatewayServiceStub(channel).ListModels(gateway_pb2.ListModelsRequest())


async def _generate(channel):
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    async for _ in stub.Generate(gateway_pb2.GenerateRequest()):
        pass


async def _decode(channel):
    call = target_pb2_grpc.TargetServiceStub(channel).Decode()
    await call.write(target_pb2.DecodeRequest())
    await call.read()


@pytest.mark.parametrize(
    ("servicer", "method"),
    [
        (Broken, _list_models),
        (Broken, _generate),
        (Broken, _decode),
        (BrokenGenerator, _generate),
    ],
)
async def test_a_mistake_of_ours_is_internal_and_keeps_our_insides_in_the_log(
    servicer, method, caplog
):
    async with serving(servicer()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(method(channel), 60)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret_name" not in caught.value.details()
    assert type(rpc.from_rpc_error(caught.value)) is errors.FlashduetError
    (record,) = [record for record in caplog.records if record.name == "flashduet.rpc"]
    assert "secret_name" in record.exc_text or "secret_name" in str(record.exc_info[1])


async def test_a_servicer_may_simply_raise_our_errors():
    async with serving(BrokenGenerator()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _list_models(channel)
    error = rpc.from_rpc_error(caught.value)
    assert isinstance(error, errors.Overloaded)
    assert error.retry_after_s == 2.5


@pytest.mark.parametrize("method", ["GatewayService/ListModels", "TargetService/Decode"])
async def test_bytes_that_are_no_message_are_the_caller_s_mistake(method):
    async with serving(Broken()) as channel:
        call = channel.stream_stream(f"/flashduet.v1.{method}")(iter([b"\xff\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class Slow(gateway_pb2_grpc.GatewayServiceServicer):
    """Has something left to say when it is ended."""

    def __init__(self) -> None:
        self.stopped, self.over = asyncio.Event(), asyncio.Event()

    async def Generate(self, request, context):
        await context.write(gateway_pb2.GenerateResponse())
        try:
            await asyncio.Event().wait()
        finally:
            await self.stopped.wait()
            self.over.set()
            await context.write(gateway_pb2.GenerateResponse())


async def test_what_a_stopped_server_cannot_send_any_more_is_no_mistake(errors):
    servicer = Slow()
    server = rpc.Server([])
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server.grpc)
    await server.start("127.0.0.1:0")
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(gateway_pb2.GenerateRequest())
        await call.read()
        await server.stop(0)
        servicer.stopped.set()
        await asyncio.wait_for(servicer.over.wait(), 60)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    assert not errors()


async def _read_all(call):
    async for _ in call:
        await asyncio.sleep(0)


class Impatient(gateway_pb2_grpc.GatewayServiceServicer):
    """Gives up a write that takes long, as a request's deadline does."""

    def __init__(self, first: int) -> None:
        self.first = first

    async def Generate(self, request, context):
        small = gateway_pb2.GenerateResponse(chunk=gateway_pb2.GenerateChunk(text="small"))
        large = gateway_pb2.GenerateResponse(chunk=gateway_pb2.GenerateChunk(text="x" * 1_000_000))
        for _ in range(self.first):
            await context.write(small)
        try:
            async with asyncio.timeout(0.3):
                while True:
                    await context.write(large)
        except TimeoutError:
            raise errors.DeadlineExceeded("the time is over") from None


@pytest.mark.parametrize("first", [0, 1])
async def test_a_write_that_is_given_up_does_not_swallow_the_status(first):
    """gRPC would send the headers twice, fail, and leave the caller waiting for ever."""
    options = [("grpc.http2.bdp_probe", 0)]
    server = rpc.Server([])
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Impatient(first), server.grpc)
    await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for wait_s in (1.0, 0.0):
            call = stub.Generate(gateway_pb2.GenerateRequest())
            await asyncio.sleep(wait_s)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(_read_all(call), 60)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert caught.value.details() == "the time is over"
    await server.stop(0)
