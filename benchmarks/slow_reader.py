"""What a client that reads one byte a second costs another: python benchmarks/slow_reader.py

Starts a stack (`--model`, `--drafter`; the default pair otherwise) and measures one client's time
per token in turns, alone (A) and beside a streaming client that reads a byte a second (B): A B A B.
A turn B begins when the slow client's answers have come to a stand, because all that may wait for
them is full; until then it is a client like any other. Prints every turn, the medians, their ratio
and what the gateway's memory did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from flashduet.client import AsyncClient
from flashduet.rpc import open_channel
from flashduet.v1 import target_pb2, target_pb2_grpc
from flashduet_cli.stack import Stack, StackConfig

PROMPT = "Write a long story about a lighthouse."
# The system lets a connection's buffer grow to 4 MB. With so many answers at once, and some 2 KB
# told of each token, it is full after some hundred steps.
CHOICES = 8
TOP_LOGPROBS = 20
SETTLE_S = 300.0


async def time_per_token(stack: Stack, options: argparse.Namespace) -> float:
    """Median over some answers of the seconds from one token to the next."""
    return statistics.median([await _one(stack, options.tokens) for _ in range(options.answers)])


async def _one(stack: Stack, tokens: int) -> float:
    async with AsyncClient(stack.endpoint) as client:
        stream = client.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
        first = last = 0.0
        async for chunk in stream:
            if chunk.token_ids:
                last = time.perf_counter()
                first = first or last
        answer = await stream.result()
    return (last - first) / (len(answer.token_ids) - 1)


async def steps(stack: Stack) -> int:
    """Forward passes that the target has made."""
    async with open_channel(stack.target_endpoint) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        return (await stub.GetLoad(target_pb2.TargetServiceGetLoadRequest(), timeout=10)).steps


@contextlib.asynccontextmanager
async def slow_reader(stack: Stack, tokens: int) -> AsyncIterator[None]:
    """A client that has asked for long answers and reads a byte a second of it."""
    host, _, port = stack.http_url.removeprefix("http://").rpartition(":")
    async with AsyncClient(stack.endpoint) as client:
        (model,) = await client.models()
    body = {
        "model": model.id,
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "n": CHOICES,
        "temperature": 1,
        "max_tokens": tokens,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n"
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, int(port)))
        await loop.sock_sendall(connection, head.encode() + b"\r\n" + data)

        async def read() -> None:
            while await loop.sock_recv(connection, 1):  # noqa: ASYNC110
                await asyncio.sleep(1)

        reading = asyncio.create_task(read())
        try:
            await _stalled(stack)
            yield
            async with AsyncClient(stack.endpoint) as client:
                if not (await client.load()).active_requests:
                    raise SystemExit("the slow client's answers ended; give it more --slow-tokens")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _stalled(stack: Stack) -> None:
    """Wait until the target has made no step for two seconds, though it has made some."""
    before, deadline = await steps(stack), time.monotonic() + SETTLE_S
    moved = False
    while time.monotonic() < deadline:
        await asyncio.sleep(2)
        now = await steps(stack)
        if moved and now == before:
            return
        moved, before = moved or now != before, now
    raise SystemExit(f"the slow client's answers did not come to a stand within {SETTLE_S:g} s")


async def compare(stack: Stack, options: argparse.Namespace) -> None:
    gateway = psutil.Process(stack.pids["gateway"])
    await time_per_token(stack, options)
    memory = gateway.memory_info().rss
    alone, beside = [], []
    for turn in range(options.turns):
        alone.append(await time_per_token(stack, options))
        async with slow_reader(stack, options.slow_tokens):
            beside.append(await time_per_token(stack, options))
            held = gateway.memory_info().rss
        print(
            f"turn {turn + 1}: alone {alone[-1] * 1e3:.2f} ms a token, beside the slow reader "
            f"{beside[-1] * 1e3:.2f} ms; gateway {(held - memory) / 2**20:+.1f} MiB"
        )
    a, b = statistics.median(alone), statistics.median(beside)
    print(f"median: {a * 1e3:.2f} ms and {b * 1e3:.2f} ms, {100 * (b / a - 1):+.1f} %")


async def run(options: argparse.Namespace) -> None:
    config = StackConfig(model=options.model, drafter=options.drafter, free_ports=True)
    async with Stack(config, log=lambda service, line: None) as stack:
        await compare(stack, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--tokens", type=int, default=128, help="of each measured answer")
    parser.add_argument("--answers", type=int, default=5, help="measured in each turn")
    parser.add_argument("--slow-tokens", type=int, default=1000, help="of each slow answer")
    parser.add_argument("--turns", type=int, default=4)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
