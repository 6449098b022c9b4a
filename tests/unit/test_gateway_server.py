"""GatewayService as a client sees it: statuses with details, cancel, deadline, load, reflection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from flashduet.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    RemoteInvalidRequest,
    Unavailable,
)
from flashduet.rpc import from_rpc_error
from flashduet.v1 import gateway_pb2 as pb
from gateway.answer import Answer
from gateway.controller import BlockController
from gateway.server import GatewayServicer
from gateway.tally import Tally
from gateway.tokenization import Tokenizer
from tests.unit.toy_model import CONTEXT_WINDOW, ids_of, plain_answer
from tests.unit.toy_stack import FOR_EVER_S, ToyStack, ask, toy_stack, until

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")


async def failure(stack: ToyStack, request: pb.GenerateRequest, **call: object) -> Exception:
    with pytest.raises(grpc.RpcError) as caught:
        await stack.generate(request, **call)
    return from_rpc_error(caught.value)


async def load(stack: ToyStack) -> pb.GatewayServiceGetLoadResponse:
    return await stack.stub.GetLoad(pb.GatewayServiceGetLoadRequest())


async def test_a_refusal_carries_the_field(stack: ToyStack) -> None:
    error = await failure(stack, ask(PROMPT, max_tokens=10_000))
    assert isinstance(error, RemoteInvalidRequest)
    assert [violation.field for violation in error.violations] == ["max_tokens"]
    assert "10000" in error.violations[0].description
    assert "512" in error.violations[0].description
    assert not stack.target.openings, "nothing was opened for it"
    await stack.all_free()


async def test_text_chat_and_ids_are_prompts(stack: ToyStack) -> None:
    by_ids = await stack.generate(ask(PROMPT))
    by_text = await stack.generate(ask("zzz", max_tokens=3))
    chat = pb.GenerateRequest(max_tokens=3)
    chat.chat.messages.add(role="user", content="hi")
    by_chat = await stack.generate(chat)
    assert by_ids.started.prompt_tokens == len(PROMPT)
    assert by_text.started.prompt_tokens == 3
    prompt = list(stack.target.openings[-1].token_ids)
    assert by_chat.started.prompt_tokens == len(prompt)
    assert by_chat.token_ids == plain_answer(prompt, 3)


async def test_request_ids_and_the_model_are_told_at_the_start(stack: ToyStack) -> None:
    answer = await stack.generate(ask(PROMPT, max_tokens=2, request_id="mine-7", model="toy"))
    assert (answer.started.request_id, answer.started.model) == ("mine-7", "toy")
    minted = {(await stack.generate(ask(PROMPT, max_tokens=1))).started.request_id for _ in "ab"}
    assert len(minted) == 2


async def test_max_tokens_default_to_what_the_window_leaves(stack: ToyStack) -> None:
    request = ask(PROMPT)
    request.ClearField("max_tokens")
    request.ignore_eos = True
    answer = await stack.generate(request)
    assert answer.complete.usage.completion_tokens == CONTEXT_WINDOW - len(PROMPT)
    assert answer.complete.finish_reason == pb.FINISH_REASON_LENGTH


async def test_too_many_requests_are_told_when_to_come_back(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, max_requests=2) as stack:
        stack.target.verify_delay_s = 0.05
        running = [asyncio.create_task(stack.generate(ask(PROMPT))) for _ in range(2)]
        await until(lambda: stack.gateway.counts.active == 2)
        error = await failure(stack, ask(PROMPT))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 1.0
        await asyncio.gather(*running)
        assert (await stack.generate(ask(PROMPT, max_tokens=2))).complete is not None
        counts = await load(stack)
        assert (counts.active_requests, counts.max_requests) == (0, 2)
        assert (counts.completed_requests, counts.failed_requests) == (3, 1)


async def test_no_target_is_unavailable(stack: ToyStack) -> None:
    await stack.target_server.stop(0)
    await until(lambda: stack.gateway.served() is None)
    assert isinstance(await failure(stack, ask(PROMPT)), Unavailable)
    assert not (await stack.stub.ListModels(pb.ListModelsRequest())).models


async def test_models_and_load_tell_what_is_there(stack: ToyStack) -> None:
    (model,) = (await stack.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.drafter, model.block_length) == ("toy", "toy-drafter", 8)
    assert model.context_window == model.max_tokens == CONTEXT_WINDOW
    assert model.created > 1_700_000_000
    assert (await load(stack)).draft_available
    await stack.kill_draft()
    await until(lambda: not stack.gateway.served().drafter)
    assert not (await load(stack)).draft_available


async def test_a_target_with_another_tokenizer_is_not_used(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer) as stack:
        stack.router.expect_tokenizer("0" * 64)
        assert stack.gateway.served() is not None, "a target without a hash is trusted"
        stack.target.tokenizer_hash = "1" * 64
        await until(lambda: stack.gateway.served() is None)
        stack.target.tokenizer_hash = "0" * 64
        await until(lambda: stack.gateway.served() is not None)


async def test_an_alias_hides_the_targets_name(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, name="alias") as stack:
        assert (
            await stack.generate(ask(PROMPT, model="alias", max_tokens=2))
        ).started.model == "alias"
        assert isinstance(await failure(stack, ask(PROMPT, model="toy")), RemoteInvalidRequest)


# Phases at which a client may go away: how to bring the request there and know that it is.
PHASES: dict[str, tuple[Callable[[ToyStack], None], Callable[[ToyStack], bool]]] = {
    "prefill": (
        lambda stack: setattr(stack.target, "open_delay_s", FOR_EVER_S),
        lambda stack: len(stack.target.openings) > 0,
    ),
    "propose": (
        lambda stack: setattr(stack.draft, "delay_s", FOR_EVER_S),
        lambda stack: len(stack.draft.blocks) > 0,
    ),
    "verify": (
        lambda stack: setattr(stack.target, "verify_delay_s", FOR_EVER_S),
        lambda stack: len(stack.target.verified_lengths) > 0,
    ),
}


@pytest.fixture
def patient() -> dict[str, object]:
    """Settings under which the gateway itself would wait for all delays."""
    return dict.fromkeys(("draft_budget_ceiling_ms", "draft_budget_floor_ms"), FOR_EVER_S * 1000)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancelled_request_frees_everything_at_once(
    tokenizer: Tokenizer, patient: dict[str, object], phase: str
) -> None:
    bring, reached = PHASES[phase]
    async with toy_stack(tokenizer, **patient) as stack:
        bring(stack)
        call = stack.stub.Generate(ask(PROMPT))
        reading = asyncio.create_task(call.read())
        await until(lambda: reached(stack))
        call.cancel()
        await stack.all_free()
        await asyncio.gather(reading, return_exceptions=True)
        counts = await load(stack)
        assert (counts.cancelled_requests, counts.failed_requests) == (1, 0)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_request_can_end_while_it_is_admitted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    admitting = asyncio.Event()

    async def slow_encode(text: str) -> list[int]:
        admitting.set()
        await asyncio.sleep(FOR_EVER_S)
        return [1]

    monkeypatch.setattr(tokenizer, "encode_text", slow_encode)
    async with toy_stack(tokenizer) as stack:
        call = stack.stub.Generate(ask("hello"), timeout=1.0 if how == "deadline" else None)
        reading = asyncio.create_task(call.read())
        await admitting.wait()
        if how == "cancel":
            call.cancel()
        await stack.all_free()
        assert not stack.target.openings
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_request_that_is_cancelled_while_its_reader_does_not_read(
    stack: ToyStack,
) -> None:
    stuck = asyncio.Event()

    async def emit(response: pb.GenerateResponse) -> None:
        if response.HasField("chunk"):
            stuck.set()
            await asyncio.Event().wait()

    answering = asyncio.create_task(stack.gateway.answer(ask(PROMPT), emit))
    await stuck.wait()
    assert stack.target.sessions
    assert stack.draft.sessions
    answering.cancel()
    await stack.all_free()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("whose", ["client", "gateway"])
async def test_a_deadline_ends_the_request_in_every_phase(
    tokenizer: Tokenizer, patient: dict[str, object], phase: str, whose: str
) -> None:
    bring, _ = PHASES[phase]
    limit = {"default_deadline_s": 1.0} if whose == "gateway" else {}
    async with toy_stack(tokenizer, **patient, **limit) as stack:
        bring(stack)
        call = {"timeout": 1.0} if whose == "client" else {}
        assert isinstance(await failure(stack, ask(PROMPT), **call), DeadlineExceeded)
        await stack.all_free()
        (opening,) = stack.target.openings
        assert 0 < opening.deadline_ms <= 1100, "the target knows the deadline too"


class Gone:
    """The context of a call whose caller is gone, which gRPC learns by a write."""

    def __init__(self) -> None:
        self.writes = 0

    def invocation_metadata(self) -> None:
        return None

    def time_remaining(self) -> None:
        return None

    async def write(self, response: pb.GenerateResponse) -> None:
        self.writes += 1
        if self.writes > 2:
            raise grpc.aio.InternalError


async def test_a_write_that_fails_is_a_caller_that_is_gone(stack: ToyStack, errors) -> None:
    with pytest.raises(Cancelled):
        await GatewayServicer(stack.gateway).Generate(ask(PROMPT, n=3), Gone())  # type: ignore[arg-type]
    await stack.all_free()
    counts = await load(stack)
    assert (counts.cancelled_requests, counts.failed_requests) == (1, 0)
    assert not errors()


async def test_two_requests_in_a_row_after_every_kind_of_end(stack: ToyStack) -> None:
    """State left over by one would show in the next."""
    expected = plain_answer(PROMPT, 10)
    stack.target.verify_delay_s = 0.02
    for _ in range(2):
        call = stack.stub.Generate(ask(PROMPT))
        await call.read()
        call.cancel()
        assert (await stack.generate(ask(PROMPT, max_tokens=10))).token_ids == expected
    await stack.all_free()


async def test_a_client_built_from_reflection_alone_finds_generate(stack: ToyStack) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
    ask_names = reflection_pb2.ServerReflectionRequest(list_services="")
    ask_file = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="flashduet.v1.GatewayService"
    )
    call = stub.ServerReflectionInfo(iter([ask_names, ask_file]))
    answers = [answer async for answer in call]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"flashduet.v1.GatewayService", "grpc.health.v1.Health"} <= names
    assert answers[1].file_descriptor_response.file_descriptor_proto


def break_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    """From its `call`-th call on, a method of ours has a mistake in it."""
    whole, calls = getattr(owner, name), itertools.count(1)

    def broken(*arguments: object, **named: object) -> object:
        if next(calls) >= call:
            raise NameError("name 'secret_name' is not defined")
        return whole(*arguments, **named)

    monkeypatch.setattr(owner, name, broken)


MISTAKES = [
    pytest.param(Tokenizer, "detokenizer", 1, id="opening"),
    pytest.param(Answer, "__init__", 1, id="answer"),
    pytest.param(BlockController, "__init__", 1, id="controller"),
    pytest.param(Answer, "commit", 1, id="prefill"),
    pytest.param(BlockController, "length", 2, id="propose"),
    pytest.param(Answer, "commit", 3, id="accept"),
    pytest.param(Tally, "stats", 1, id="complete"),
]


@pytest.mark.parametrize(("owner", "name", "call"), MISTAKES)
async def test_a_mistake_of_ours_is_internal_and_frees_everything(
    stack: ToyStack, monkeypatch, caplog, owner, name, call
) -> None:
    with monkeypatch.context() as patch:
        break_at(patch, owner, name, call)
        with pytest.raises(grpc.RpcError) as caught:
            await stack.generate(ask(PROMPT))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret_name" not in caught.value.details()
    assert "secret_name" in caplog.text
    await stack.all_free()
    assert stack.router.route(drafted=True).target.sessions == 0
    assert stack.gateway.counts.failed == 1
    assert (await stack.generate(ask(PROMPT))).complete is not None
