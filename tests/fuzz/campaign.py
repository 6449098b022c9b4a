"""The whole campaign against one running stack, and what must be true of it afterwards."""

from __future__ import annotations

from collections.abc import Callable

from flashduet.client import Client
from flashduet.errors import FlashduetError
from flashduet.sampling.params import Sampling
from tests.fuzz.examples import Runner
from tests.fuzz.grpc_frames import run_frames
from tests.fuzz.grpc_messages import Place, run_messages
from tests.fuzz.http_parts import run_http
from tests.fuzz.report import Part
from tests.fuzz.schema import run_schema
from tests.support.pair import Pair

NOTHING_LEFT_S = 60


def place_of(pair: Pair) -> Place:
    host, _, port = pair.http.removeprefix("http://").rpartition(":")
    with Client(pair.gateway) as client:
        model = client.models()[0].id
    return Place(pair.gateway, pair.target, pair.draft, host, int(port), model)


def run_campaign(
    pair: Pair,
    requests: int,
    seed: int,
    at_once: int = 16,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Part]:
    """Send that many requests of all kinds; the last part is about the stack's state afterwards."""
    place, pids, lines = place_of(pair), pair.pids(), len(pair.logs)
    before = _answer(pair)
    parts: list[Part] = []
    with Runner(at_once) as runner:
        for part in run_http(runner, place, requests * 50 // 100, seed):
            parts.append(part)
            progress(f"{part.name}: {part.requests} requests, {part.failed} failed")
        for run, percent in ((run_schema, 5), (run_messages, 35), (run_frames, 10)):
            for part in run(runner, place, requests * percent // 100, seed):
                parts.append(part)
                progress(f"{part.name}: {part.requests} requests, {part.failed} failed")
    parts.append(_afterwards(pair, pids, before, lines))
    return parts


def _afterwards(pair: Pair, pids: dict[str, int], before: list[int], lines: int) -> Part:
    """The same processes run, hold nothing, logged no error, and answer as they did before."""
    part = Part("the stack afterwards")
    with part.timed():
        if pair.pids() != pids:
            part.fail(f"processes were {pids} and are {pair.pids()}: {pair.ended()}")
            return part
        try:
            pair.assert_nothing_left(within_s=NOTHING_LEFT_S)
            after = _answer(pair)
        except (AssertionError, FlashduetError) as error:
            part.fail(str(error))
        else:
            if after != before:
                part.fail(f"the answer was {before} and is {after}")
        for line in errors(pair.logs[lines:]):
            part.fail(f"logged: {line}")
    return part


def errors(lines: list[str]) -> list[str]:
    """Logged errors that are ours; gRPC logs some of its own about headers it cannot read."""
    found = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        theirs = noise(line) or "UnicodeDecodeError" in following
        if " ERROR " in line and not theirs:
            found.append(line)
    return found


def noise(line: str) -> bool:
    """What gRPC itself logs of headers that it cannot read."""
    return any(
        mark in line for mark in ("hpack_parser", " ERROR grpc._cython.", "codec can't decode")
    )


def _answer(pair: Pair) -> list[int]:
    with Client(pair.gateway) as client:
        sampling = Sampling(temperature=4.0, seed=1)
        stream = client.generate(
            [5, 9, 77], max_tokens=30, sampling=sampling, ignore_eos=True, timeout=240
        )
        return stream.result().token_ids
