"""The part of the campaign that speaks broken HTTP/2 to the gRPC ports."""

from __future__ import annotations

import asyncio
import struct

from hypothesis import strategies as st

from flashduet.v1 import gateway_pb2
from tests.fuzz.examples import Runner, for_each_batch
from tests.fuzz.grpc_messages import Place
from tests.fuzz.http_requests import broken
from tests.fuzz.report import Part

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_READ_S = 60.0
_PATIENCE_S = 0.02
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """One HTTP/2 frame; `length` other than the payload's makes it a lie."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """A header field in HPACK, literal and not indexed."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _headers(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    ]
    return b"".join(header(*field) for field in fields)


_PATHS = st.sampled_from(
    [
        *(b"/flashduet.v1.GatewayService/Generate", b"/flashduet.v1.GatewayService/GetLoad"),
        *(b"/flashduet.v1.TargetService/Decode", b"/flashduet.v1.DraftService/Propose"),
        *(b"/flashduet.v1.DraftService/Ingest", b"/nobody/Nothing", b"", b"*"),
    ]
)
_MORE = st.sampled_from(
    [
        *((b"grpc-timeout", b"1S"), (b"grpc-timeout", b"99999999H"), (b"grpc-timeout", b"-1x")),
        *((b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"nothing"), (b"traceparent", b"\xff")),
        *((b"Upper", b"case"), (b":late", b"pseudo"), (b"x-bin", b"%%%"), (b"x", b"y" * 120)),
    ]
)


def _valid_message() -> bytes:
    request = gateway_pb2.GenerateRequest(max_tokens=2)
    request.token_ids.ids.extend([5, 6])
    return request.SerializeToString()


@st.composite
def _grpc_data(draw: st.DrawFn) -> bytes:
    """Length-prefixed messages, some with a lie in the prefix."""
    parts = []
    for _ in range(draw(st.integers(0, 2))):
        message = draw(st.sampled_from([b"", _valid_message(), b"\xff" * 20]) | st.binary())
        compressed = draw(st.sampled_from([0, 0, 0, 1, 7]))
        size = draw(st.sampled_from([len(message)] * 3 + [0, len(message) + 1, 2**31, 2**32 - 1]))
        parts.append(struct.pack(">BI", compressed, size) + message)
    return b"".join(parts)


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """What a client sends on one connection, from the preface on."""
    settings = frame(_SETTINGS, 0, 0, draw(st.sampled_from([b"", b"\0\3\0\0\0\1", b"\0" * 5])))
    sent = [PREFACE, settings]
    stream = 1
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 3)) == 0:
            kind, flags = draw(st.integers(0, 12)), draw(st.integers(0, 255))
            lie = draw(st.sampled_from([None, None, 0, 1, 2**24 - 1]))
            sent.append(frame(kind, flags, draw(st.integers(0, 9)), draw(st.binary()), lie))
            continue
        block = _headers(draw(_PATHS), *draw(st.lists(_MORE, max_size=2)))
        ends = draw(st.sampled_from([_END_HEADERS] * 4 + [0, _END_HEADERS | _END_STREAM]))
        sent.append(frame(_HEADERS, ends, stream, block))
        sent.append(frame(_DATA, _END_STREAM, stream, draw(_grpc_data())))
        stream += 2
    whole = b"".join(sent)
    return draw(broken(whole)) if draw(st.integers(0, 2)) == 0 else whole


def run_frames(runner: Runner, place: Place, requests: int, seed: int) -> list[Part]:
    """Each conversation on a connection of its own, and counted as one request."""
    part, room = Part("grpc frames"), asyncio.Semaphore(runner.at_once)
    addresses = [place.gateway, place.gateway, place.target, place.draft]

    async def send(number: int, data: bytes) -> None:
        host, _, port = addresses[number % len(addresses)].rpartition(":")
        async with room:
            try:
                async with asyncio.timeout(_READ_S):
                    part.count(await _talk(host, int(port), data))
            except TimeoutError:
                part.count("hung", f"no connection, or one left open, after {data!r:.1000}")

    async def send_all(batch: list[bytes]) -> None:
        await asyncio.gather(*(send(number, data) for number, data in enumerate(batch)))

    with part.timed():
        for_each_batch(runner, conversations(), requests, seed, send_all)
    return [part]


async def _talk(host: str, port: int, data: bytes) -> str:
    """Send everything, and hang up after a moment; what the server did with the connection."""
    reader, writer = await _connection(host, port)
    try:
        writer.write(data)
        await writer.drain()
        if await reader.read(65536):
            # Calls that were right begin to be worked on before their caller goes away.
            await asyncio.sleep(_PATIENCE_S)
            writer.write_eof()
            await reader.read()
    except (ConnectionResetError, BrokenPipeError):
        return "reset"
    finally:
        writer.transport.abort()
    return "closed"


async def _connection(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection; gRPC's server is built again after some conversations, which takes a moment."""
    while True:
        try:
            return await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            await asyncio.sleep(_PATIENCE_S)
