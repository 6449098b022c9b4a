"""A client that reads a byte a second over HTTP costs the gateway little and others nothing."""

import json
import socket
import time

import psutil

from flashduet.client import Client
from flashduet.client.results import Generation
from flashduet.sampling.params import Sampling
from tests.support.pair import Pair, wait_until

# With 20 likely tokens told of each token this is some 7 MB of events, which no socket's buffers
# hold: the system lets them grow to 4 MB.
BODY = {
    "model": "target",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "max_tokens": 480,
    "ignore_eos": True,
    "temperature": 4,
    "n": 8,
    "logprobs": True,
    "top_logprobs": 20,
}
MEMORY = 32 * 2**20
WAIT_S = 240


def slow_reader(pair: Pair) -> socket.socket:
    """A connection with an answer on its way that nobody has read from yet."""
    host, _, port = pair.http.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    # Before connecting, so that the other side is told of so little room.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT_S)
    connection.connect((host, int(port)))
    data = json.dumps(BODY).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def answer(pair: Pair) -> Generation:
    with Client(pair.gateway) as client:
        sampling = Sampling(temperature=4.0, seed=3)
        stream = client.generate(
            [5, 9, 77], max_tokens=100, sampling=sampling, ignore_eos=True, timeout=240
        )
        return stream.result()


def active(pair: Pair) -> int:
    """Answers under way."""
    with Client(pair.gateway) as client:
        return client.load().active_requests


def standing_still(pair: Pair) -> bool:
    """For long enough that it is not just a machine that has other things to do."""
    steps = pair.target_load().steps
    time.sleep(5)
    return pair.target_load().steps == steps


def test_a_slow_reader_fills_no_memory_and_holds_up_nobody_and_gets_all_in_the_end(pair: Pair):
    expected = answer(pair)
    gateway = psutil.Process(pair.pid("gateway"))
    before = gateway.memory_info().rss
    reader = slow_reader(pair)
    with reader, reader.makefile("rb") as answered:
        assert answered.read(1) == b"H"
        # All that may wait for it is full: its sessions rest until it reads on.
        wait_until(lambda: standing_still(pair), "the slow reader's answers to rest", WAIT_S)
        for _ in range(3):
            time.sleep(1)
            assert len(answered.read(1)) == 1
            assert answer(pair).token_ids == expected.token_ids
        assert active(pair) == BODY["n"], "an answer ended: it had found room somewhere"
        assert gateway.memory_info().rss - before < MEMORY
        assert answered.read().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    pair.assert_nothing_left()
