"""A client that goes away, on any route and at any moment, leaves nothing behind."""

import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from flashduet.client import Client
from flashduet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support.pair import Pair, wait_until

LONG = 440
COMMON = {"model": "target", "max_tokens": LONG, "ignore_eos": True, "temperature": 4, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, whole": ("/v1/chat/completions", COMMON | CHAT),
    "chat, streamed": ("/v1/chat/completions", COMMON | CHAT | {"stream": True}),
    "completion, whole": ("/v1/completions", COMMON | {"prompt": "hi", "logprobs": 2}),
    "completions of a batch, streamed": (
        "/v1/completions",
        COMMON | {"prompt": ["hi", "there", "go"], "stream": True},
    ),
}


def request_bytes(route: str) -> bytes:
    path, body = ROUTES[route]
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(pair: Pair) -> socket.socket:
    host, _, port = pair.http.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def reset(connection: socket.socket) -> None:
    """Close without a goodbye, as a client does that was killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def generate_request() -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(
        max_tokens=LONG,
        ignore_eos=True,
        n=3,
        top_logprobs=2,
        sampling=common_pb2.SamplingParams(temperature=4, frequency_penalty=0.5),
    )
    request.token_ids.ids.extend([5, 9, 77] * 20)
    return request


def cancelled(pair: Pair) -> int:
    with Client(pair.gateway) as client:
        return client.load().cancelled_requests


@pytest.fixture
def unharmed(pair: Pair) -> Iterator[None]:
    """Afterwards nothing is held, nothing was logged as our mistake, and no process is new."""
    lines, pids, descriptors = len(pair.logs), pair.pids(), pair.descriptors()
    yield
    pair.assert_nothing_left()
    assert pair.pids() == pids
    assert not [line for line in pair.logs[lines:] if " ERROR " in line]
    pair.assert_closed(descriptors)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closed", "reset"])
def test_a_client_that_is_gone_is_not_worked_for(pair: Pair, unharmed, route, leave):
    before = cancelled(pair)
    connection = connect(pair)
    connection.sendall(request_bytes(route))
    wait_until(lambda: pair.target_load().kv_tokens > 60, "the answers to be under way")
    gone = time.monotonic()
    leave(connection)
    pair.assert_nothing_left()
    print(f"{route}: free {time.monotonic() - gone:.2f} s after its client was gone")
    # It did not just come to its end.
    assert cancelled(pair) > before


def test_a_call_that_is_cancelled_after_any_of_its_first_messages_leaves_nothing(pair, unharmed):
    """Before Started, between Started and the first chunk, and in the rounds of three answers."""
    before, calls = cancelled(pair), 0
    with grpc.insecure_channel(pair.gateway) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for messages in (0, 1, 2, 3, 4, 6, 9, 14, 20, 40):
            for mode in (gateway_pb2.SPECULATION_MODE_FIXED, gateway_pb2.SPECULATION_MODE_OFF):
                request = generate_request()
                request.speculation.mode = mode
                call, calls = stub.Generate(request, timeout=240), calls + 1
                for _ in range(messages):
                    next(call)
                call.cancel()
    pair.assert_nothing_left()
    # A call that was cancelled before it arrived counts nowhere.
    assert cancelled(pair) >= before + calls - 2


def test_calls_cancelled_as_one_of_their_answers_ends_leave_nothing(pair: Pair, unharmed):
    """One answer is over and its sessions are freed while the others go on."""
    request = generate_request()
    # Of the likeliest tokens one ends an answer now and then, so that they end at different times.
    request.stop_token_ids.extend(range(100, 130))
    with grpc.insecure_channel(pair.gateway) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for wanted in (1, 1, 2, 2, 3, 3):
            call, finished = stub.Generate(request, timeout=240), 0
            for response in call:
                finished += response.HasField("finished")
                if finished == wanted:
                    break
            call.cancel()
            assert finished == wanted


def test_clients_that_leave_at_random_moments_leave_nothing(pair: Pair, unharmed):
    """Within the headers, within the body, in admission, in prefill, in rounds, in an event."""
    source = random.Random(11)
    for number in range(60):
        route = source.choice(list(ROUTES))
        data = request_bytes(route)
        connection = connect(pair)
        if number % 4 == 0:
            data = data[: source.randrange(len(data))]
        connection.sendall(data)
        time.sleep(source.expovariate(20))
        if number % 3 == 0:
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                connection.recv(source.choice([1, 200, 5000]))
        source.choice([socket.socket.close, reset])(connection)
