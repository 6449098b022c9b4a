"""A client that goes away, on any route and at any moment, leaves nothing behind."""

import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from flashduet.client import Client
from flashduet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support.pair import FREED_WITHIN_S, Pair, wait_until

LONG = 440
# What is promised of a client that leaves. A busy machine may miss it now and then; something in
# the way that waits as long would miss it nearly always.
PROMISED_S = 1.0
FAST_TRIES, MOST_TRIES = 5, 20
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


def ask_by_http(pair: Pair, route: str) -> Callable[[], None]:
    """Ask; what is returned makes the client go away."""
    connection = connect(pair)
    connection.sendall(request_bytes(route))
    return lambda: reset(connection)


def ask_by_call(pair: Pair) -> Callable[[], None]:
    channel = grpc.insecure_channel(pair.gateway)
    call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(generate_request(), timeout=240)

    def leave() -> None:
        call.cancel()
        channel.close()

    return leave


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
    leave(connection)
    pair.assert_nothing_left()
    # It did not just come to its end.
    assert cancelled(pair) > before


@pytest.mark.parametrize("route", ["call", *ROUTES])
def test_all_that_a_client_held_is_free_within_a_second(pair: Pair, unharmed, route: str):
    before, fast, slow = cancelled(pair), [], []
    while len(fast) < FAST_TRIES or len(fast) <= len(slow):
        leave = ask_by_call(pair) if route == "call" else ask_by_http(pair, route)
        wait_until(lambda: pair.target_load().kv_tokens > 60, "the answers to be under way")
        gone = time.monotonic()
        leave()
        while pair.left_over():
            assert time.monotonic() < gone + FREED_WITHIN_S, pair.left_over()
        seconds = time.monotonic() - gone
        (fast if seconds < PROMISED_S else slow).append(seconds)
        print(f"{route}: {seconds:.3f} s")
        assert len(fast) + len(slow) < MOST_TRIES, f"too slow too often: {slow}; fast: {fast}"
    # They did not just come to their end.
    assert cancelled(pair) >= before + len(fast) + len(slow)


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
