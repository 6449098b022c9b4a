"""Errors cross the wire with their status, their fields and their retry time; health is true."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flashduet import errors, rpc
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc

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
            await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
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
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await running.serving()
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_taken_port_is_an_error_that_names_the_variable(server):
    running, _ = server
    second = rpc.Server(["flashduet.v1.GatewayService"])
    with pytest.raises(errors.ConfigurationError, match="LISTEN"):
        await second.start(f"127.0.0.1:{running.port}")
    await second.stop(0)
