"""Whatever anyone sends to a service, it refuses by name, stays up, and keeps nothing of it."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable

import grpc
import grpc.aio
import pytest

from flashduet import PROTOCOL_VERSION
from flashduet.client import Client
from flashduet.rpc import open_channel
from flashduet.sampling.params import Sampling
from flashduet.v1 import common_pb2, draft_pb2, gateway_pb2, target_pb2
from flashduet.v1.draft_pb2_grpc import DraftServiceStub
from flashduet.v1.gateway_pb2_grpc import GatewayServiceStub
from flashduet.v1.target_pb2_grpc import TargetServiceStub
from tests.support.hostile import Hostile
from tests.support.pair import Pair

OK = grpc.StatusCode.OK
# What a caller's own mistake may be answered with.
REFUSALS = {
    OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
STREAMS = 150
CALL_S = 120.0


async def talk(call: grpc.aio.StreamStreamCall, messages: Iterable) -> grpc.StatusCode:
    """Send messages until the peer has had enough, read what it says; how it ended the stream.

    A write that meets the stream's end makes grpc.aio forget the peer's status: OK then.
    """

    async def read() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(CALL_S):
            for message in messages:
                if call.done():
                    break
                await call.write(message)
                await asyncio.sleep(0)
            await call.done_writing()
            await reading
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        pass
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    code = await asyncio.wait_for(call.code(), CALL_S)
    # Shown when the test fails.
    print(code.name, await call.details())
    return OK if await call.details() == "Internal error from Core" else code


def attack(pair: Pair, endpoint: str, stub: type, method: str, streams) -> Counter:
    """How often the service ended a stream in which way."""

    async def run() -> Counter:
        codes: Counter = Counter()
        async with open_channel(endpoint) as channel:
            for messages in streams:
                codes[await talk(getattr(stub(channel), method)(), messages)] += 1
        return codes

    return asyncio.run(run())


def answer(pair: Pair) -> list[int]:
    with Client(pair.gateway) as client:
        run = client.generate(
            [5, 9, 77], max_tokens=30, sampling=Sampling(temperature=4.0, seed=1), ignore_eos=True,
            speculation="fixed", block_length=4, timeout=240,
        ).result()  # fmt: skip
    assert run.speculation.drafted_tokens > 0
    return run.token_ids


@pytest.fixture
def unharmed(pair: Pair):
    """Before and after a test the stack answers the same, drafted, and holds nothing."""
    before, lines, pids = answer(pair), len(pair.logs), pair.pids()
    yield
    print(*pair.logs[lines:], sep="\n")
    assert answer(pair) == before
    assert pair.pids() == pids
    pair.assert_nothing_left()
    assert not [line for line in pair.logs[lines:] if "Traceback" in line or " ERROR " in line]


def openings(pair: Pair, draft_instance_id: bytes) -> target_pb2.DecodeRequest:
    return target_pb2.DecodeRequest(
        traceparent="00-" + "1" * 32 + "-" + "1" * 16 + "-01",
        open=target_pb2.DecodeOpen(
            session_id=os.urandom(16),
            token_ids=[5, 6, 7],
            prompt_length=3,
            max_tokens=50,
            sampling=common_pb2.SamplingParams(temperature=1.0, seed=1),
            draft_instance_id=draft_instance_id,
            deadline_ms=5000,
        ),
    )


def test_no_message_on_a_decode_stream_breaks_the_target(pair: Pair, unharmed):
    draft_id = pair.draft_info().instance_id
    hostile = Hostile(1, [draft_id])

    def streams():
        for number in range(STREAMS):
            opening = openings(pair, draft_id)
            if number % 3 == 0:
                yield [hostile.message(target_pb2.DecodeRequest) for _ in range(3)]
            elif number % 3 == 1:
                yield [hostile.mutated(opening), *_verifies(hostile)]
            else:
                yield [opening, *_verifies(hostile)]

    codes = attack(pair, pair.target, TargetServiceStub, "Decode", streams())
    assert set(codes) <= REFUSALS, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 10


def _verifies(hostile: Hostile) -> Iterable[target_pb2.DecodeRequest]:
    base = 3
    for number in range(1, 6):
        verify = target_pb2.DecodeVerify(round=number, base=base, token_ids=[])
        request = target_pb2.DecodeRequest(verify=verify)
        yield request if number < 4 else hostile.mutated(request)
        base += 1


def test_no_message_on_a_propose_stream_breaks_the_draft(pair: Pair, unharmed):
    target_id = pair.target_info().instance_id
    ids = [os.urandom(16) for _ in range(3)]
    hostile = Hostile(2, [target_id, *ids])

    def streams():
        for _ in range(STREAMS):
            opening = draft_pb2.ProposeRequest(
                session_id=ids[0],
                open=draft_pb2.ProposeOpen(target_instance_id=target_id, prompt_length=3),
            )
            block = draft_pb2.ProposeRequest(
                session_id=ids[0],
                block=draft_pb2.ProposeBlock(
                    round=1, committed_length=1, anchor_token_id=5, block_length=4, budget_us=50_000
                ),
            )
            yield [
                opening,
                block,
                *(hostile.mutated(block) for _ in range(6)),
                *(hostile.mutated(opening) for _ in range(3)),
                *(hostile.message(draft_pb2.ProposeRequest) for _ in range(10)),
            ]

    codes = attack(pair, pair.draft, DraftServiceStub, "Propose", streams())
    assert set(codes) == {OK}, codes


def test_no_message_on_an_ingest_stream_breaks_the_draft(pair: Pair, unharmed):
    facts = pair.target_info().facts
    hostile = Hostile(3, [pair.target_info().instance_id])
    width = 3 * facts.hidden_size

    def chunk(rows: int, row_width: int) -> draft_pb2.IngestRequest:
        return draft_pb2.IngestRequest(
            chunk=draft_pb2.IngestChunk(
                session_id=os.urandom(16),
                token_ids=[1] * rows,
                sequence=1,
                features=common_pb2.TensorPayload(
                    data_type=common_pb2.DATA_TYPE_FLOAT32,
                    shape=[rows, row_width],
                    inline=bytes(rows * row_width * 4),
                ),
            )
        )

    def streams():
        for number in range(STREAMS):
            hello = draft_pb2.IngestRequest(
                hello=draft_pb2.IngestHello(
                    protocol_version=PROTOCOL_VERSION,
                    target_instance_id=os.urandom(16),
                    facts=facts,
                    offers=[common_pb2.TRANSPORT_INLINE],
                )
            )
            attach = draft_pb2.IngestRequest(
                attach=draft_pb2.IngestAttach(transport=common_pb2.TRANSPORT_INLINE)
            )
            match number % 5:
                case 0:
                    yield [hostile.message(draft_pb2.IngestRequest) for _ in range(3)]
                case 1:
                    yield [hostile.mutated(hello), attach]
                case 2:
                    yield [hello, hostile.mutated(attach)]
                case 3:
                    yield [chunk(2, width), hello, attach]
                case _:
                    good = chunk(2, width)
                    yield [
                        *(hello, attach, good, chunk(2, width + 1), chunk(700, width)),
                        *(hostile.mutated(good) for _ in range(10)),
                        *(hostile.message(draft_pb2.IngestRequest) for _ in range(2)),
                    ]

    codes = attack(pair, pair.draft, DraftServiceStub, "Ingest", streams())
    assert set(codes) <= REFUSALS, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 10
    assert not pair.draft_load().rings - 1, "only the target's own ring is mapped"


def test_no_request_breaks_the_gateway(pair: Pair, unharmed):
    hostile = Hostile(4, [])
    good = gateway_pb2.GenerateRequest(
        max_tokens=3,
        stop=["x"],
        sampling=common_pb2.SamplingParams(temperature=1.0),
        speculation=gateway_pb2.Speculation(mode=gateway_pb2.SPECULATION_MODE_FIXED),
    )
    good.chat.messages.add(role="user", content="hello")

    async def run() -> Counter:
        codes: Counter = Counter()
        async with open_channel(pair.gateway) as channel:
            stub = GatewayServiceStub(channel)
            for number in range(2 * STREAMS):
                request = (
                    hostile.mutated(good)
                    if number % 2
                    else hostile.message(gateway_pb2.GenerateRequest)
                )
                if not request.HasField("max_tokens"):
                    request.max_tokens = 3
                trace = (("traceparent", ["", "00", "x" * 5000, "00-0-0-0"][number % 4]),)
                call = stub.Generate(request, timeout=CALL_S, metadata=trace)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    print(error.code().name, error.details())
                assert len(await call.details()) < 500
                codes[await call.code()] += 1
        return codes

    codes = asyncio.run(run())
    assert set(codes) <= {OK, grpc.StatusCode.INVALID_ARGUMENT}, codes
    assert min(codes.values()) > 10
