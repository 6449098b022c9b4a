"""The part of the campaign that calls every gRPC method with messages, right and wrong."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from hypothesis import strategies as st

from flashduet.rpc import open_channel
from flashduet.v1 import common_pb2, draft_pb2, gateway_pb2, target_pb2
from tests.fuzz.examples import Runner, for_each_batch
from tests.fuzz.http_requests import broken
from tests.fuzz.report import Part
from tests.support.hostile import Hostile

CALL_S = 60.0
_MOST_TOKENS = 3
# Whatever a caller sends, it must not be told that the fault is ours.
OUR_FAULT = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the stack listens, gRPC as host:port; `model` is the name that it serves."""

    gateway: str
    target: str
    draft: str
    http_host: str
    http_port: int
    model: str


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service; `address` is a field of Place."""

    address: str
    path: str
    request: type[Message]
    streams_requests: bool
    streams_responses: bool


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent: the serialized messages of one call."""

    method: Method
    messages: tuple[bytes, ...]


def methods() -> list[Method]:
    """All methods of all services, as the contracts have them."""
    found = []
    for address, module in (("gateway", gateway_pb2), ("target", target_pb2), ("draft", draft_pb2)):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found.append(
                    Method(
                        address,
                        f"/{service.full_name}/{method.name}",
                        method.input_type._concrete_class,
                        method.client_streaming,
                        method.server_streaming,
                    )
                )
    return found


def _good() -> dict[str, Callable[[], Message]]:
    """A message, for the methods that want one, that is answered with more than a refusal."""
    generate = gateway_pb2.GenerateRequest(
        max_tokens=_MOST_TOKENS,
        n=2,
        top_logprobs=1,
        stop=["x"],
        stop_token_ids=[5],
        sampling=common_pb2.SamplingParams(
            temperature=1.0, top_p=0.9, seed=1, presence_penalty=0.1, logit_bias={5: 1.0}
        ),
        speculation=gateway_pb2.Speculation(mode=gateway_pb2.SPECULATION_MODE_FIXED),
    )
    generate.chat.messages.add(role="user", content="hello")

    def decode() -> Message:
        return target_pb2.DecodeRequest(
            open=target_pb2.DecodeOpen(
                session_id=os.urandom(16),
                token_ids=[5, 6, 7],
                prompt_length=3,
                max_tokens=_MOST_TOKENS,
                sampling=common_pb2.SamplingParams(temperature=1.0, seed=1),
                deadline_ms=5000,
            )
        )

    def propose() -> Message:
        return draft_pb2.ProposeRequest(
            session_id=os.urandom(16), open=draft_pb2.ProposeOpen(prompt_length=3)
        )

    return {"Generate": lambda: generate, "Decode": decode, "Propose": propose}


@st.composite
def calls(draw: st.DrawFn, chosen: list[Method]) -> Call:
    """One method with messages at the edges, with good ones a field of which has gone wrong, with
    broken bytes of both, or with any bytes."""
    method = draw(st.sampled_from(chosen))
    # Not an integer of Hypothesis's, which come back to small numbers again and again.
    chance = draw(st.randoms(use_true_random=True))
    hostile = Hostile(chance.getrandbits(32), [os.urandom(16)])
    good = _good().get(method.path.rpartition("/")[2], method.request)
    messages = []
    for _ in range(draw(st.integers(1, 4)) if method.streams_requests else 1):
        kind = draw(st.integers(0, 9))
        if kind == 0:
            messages.append(draw(st.binary(max_size=100)))
            continue
        message = hostile.message(method.request) if kind < 4 else hostile.mutated(good())
        if isinstance(message, gateway_pb2.GenerateRequest):
            _shorten(message)
        data = message.SerializeToString()
        messages.append(draw(broken(data)) if kind > 7 else data)
    return Call(method, tuple(messages))


def _shorten(message: gateway_pb2.GenerateRequest) -> None:
    """A long answer shows nothing that a short one does not; limits out of range stay so."""
    if not message.HasField("max_tokens") or _MOST_TOKENS < message.max_tokens < 1000:
        message.max_tokens = _MOST_TOKENS
    if 4 < message.n < 1000:
        message.n = 4


def run_messages(runner: Runner, place: Place, requests: int, seed: int) -> list[Part]:
    """Two parts: the gateway is for strangers, target and draft for services of ours."""
    outer = [method for method in methods() if method.address == "gateway"]
    inner = [method for method in methods() if method.address != "gateway"]
    # The method that does something gets most of the calls.
    outer += [method for method in outer if method.streams_responses] * 8
    return [
        _run(runner, "grpc gateway", place, outer, requests * 2 // 3, seed),
        _run(runner, "grpc target and draft", place, inner, requests - requests * 2 // 3, seed),
    ]


def _run(
    runner: Runner, name: str, place: Place, chosen: list[Method], requests: int, seed: int
) -> Part:
    part, channels = Part(name), {}
    room = asyncio.Semaphore(runner.at_once)

    async def send(call: Call) -> None:
        async with room:
            address = getattr(place, call.method.address)
            if address not in channels:
                channels[address] = open_channel(address)
            code, details = await _code(channels[address], call)
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and not _asked_for(details):
                # What hangs a service does so again; a machine that stood still for a while, not.
                code, details = await _code(channels[address], call)
        failed = (code in OUR_FAULT and not _asked_for(details)) or len(details) > 1000
        told = f"{code.name} {details[:300]!r} from {call.method.path}"
        part.count(code.name, f"{told} to {call.messages!r:.1000}" if failed else None)

    async def send_all(batch: list[Call]) -> None:
        await asyncio.gather(*map(send, batch))

    async def close() -> None:
        for channel in channels.values():
            await channel.close()

    with part.timed():
        for_each_batch(runner, calls(chosen), requests, seed, send_all)
    runner.start(close()).result(30)
    return part


def _asked_for(details: str) -> bool:
    """Whether a session ended by the deadline that its own message gave it, of a few ms perhaps."""
    return re.fullmatch(r"the session's \d+ ms are over", details) is not None


async def _code(channel: grpc.aio.Channel, call: Call) -> tuple[grpc.StatusCode, str]:
    """How the service ended the call."""
    method = call.method
    kind = "_".join(
        "stream" if streams else "unary"
        for streams in (method.streams_requests, method.streams_responses)
    )
    multi: Any = getattr(channel, kind)(
        method.path, request_serializer=bytes, response_deserializer=bytes
    )

    async def messages() -> AsyncIterator[bytes]:
        for message in call.messages:
            yield message

    sent = multi(messages() if method.streams_requests else call.messages[0], timeout=CALL_S)
    try:
        if method.streams_responses:
            async for _ in sent:
                pass
        else:
            await sent
    except grpc.aio.AioRpcError:
        pass
    code, details = await sent.code(), await sent.details() or ""
    # A message that is written as the peer ends the stream makes grpc.aio forget the status.
    if details == "Internal error from Core":
        return grpc.StatusCode.OK, ""
    return code, details
