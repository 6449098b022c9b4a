"""A call that ends grpc.aio's own loop ends neither the server nor the calls under way."""

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

from flashduet.rpc import Server, open_channel
from tests.fuzz.grpc_frames import PREFACE, frame

SERVING = health_pb2.HealthCheckResponse.SERVING
HEADERS, SETTINGS, END_HEADERS = 1, 4, 4
# A GOAWAY frame of the connection: its type, no flags, stream 0.
GOODBYE = b"\x07\x00\x00\x00\x00\x00"


def literal(name: bytes, value: bytes) -> bytes:
    """A header field in HPACK, not indexed."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


# A POST to a path that is no UTF-8.
CALL = b"".join(
    [
        *(literal(b":method", b"POST"), literal(b":scheme", b"http")),
        *(literal(b":path", b"/no\xff/body"), literal(b":authority", b"localhost")),
        *(literal(b"content-type", b"application/grpc"), literal(b"te", b"trailers")),
    ]
)


async def attack(server: Server) -> None:
    """Until gRPC has given its server up and another one is there: what a call meets in between is
    gRPC's affair."""
    before = server.grpc._server
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, CALL))
    await writer.drain()
    seen = b""
    while GOODBYE not in seen:
        seen += await reader.read(65536)
    writer.close()
    while server.grpc._server is before:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def check(port: int) -> int:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
        return answer.status


async def test_a_path_that_is_no_utf8_closes_no_port():
    server = Server([])
    await server.start("127.0.0.1:0")
    await server.serving()
    try:
        for _ in range(3):
            async with asyncio.timeout(60):
                await attack(server)
            assert await check(server.port) == SERVING
    finally:
        await server.stop(1)


async def test_calls_under_way_outlast_it():
    server = Server([])
    await server.start("127.0.0.1:0")
    await server.serving()
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=300
            )
            assert (await watch.read()).status == SERVING
            async with asyncio.timeout(60):
                await attack(server)
            assert await check(server.port) == SERVING
            await server.not_serving()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
    finally:
        await server.stop(1)
