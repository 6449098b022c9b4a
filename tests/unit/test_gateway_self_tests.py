"""A new pair is asked once for what its drafter promises, and a collapse is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from flashduet.v1 import draft_pb2
from flashduet.v1.gateway_pb2 import GenerateComplete, GenerateRequest
from gateway.router import Route
from gateway.self_tests import SelfTests, least
from gateway.tokenization import Tokenizer
from tests.unit.toy_draft import BLOCK_LENGTH
from tests.unit.toy_model import ids_of
from tests.unit.toy_stack import ToyStack, ask, toy_stack, until

pytest_plugins = ["tests.unit.gateway_fixtures"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("gateway.self_tests._POLL_S", 0.02)
    caplog.set_level(logging.INFO)


def promise(acceptance_length: float, tokens: int = 40) -> draft_pb2.SelfTest:
    return draft_pb2.SelfTest(
        prompt_token_ids=ids_of("what is to be seen"),
        tokens=tokens,
        block_length=BLOCK_LENGTH,
        acceptance_length=acceptance_length,
    )


@asynccontextmanager
async def a_pair_under_test(tokenizer: Tokenizer, **draft: object) -> AsyncIterator[ToyStack]:
    """A stack whose draft has these attributes, being tested."""
    async with toy_stack(tokenizer) as stack:
        await stack.kill_draft()
        await stack.restart_draft(**draft)
        tests = asyncio.create_task(SelfTests(stack.gateway, stack.router, quiet_s=0).run())
        try:
            yield stack
        finally:
            tests.cancel()
            await stack.all_free()


async def test_a_pair_that_keeps_its_promise_is_tested_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pair_under_test(tokenizer, self_test=promise(4.0)) as stack:
        await until(lambda: "self test: drafter toy-drafter has" in caplog.text)
        proposals = stack.draft.proposals
        assert proposals
        await asyncio.sleep(0.2)
        assert stack.draft.proposals == proposals
        assert stack.gateway.counts.completed == 0, "it is nobody's request"
        assert stack.draft.openings[-1].drafter_only, "it is about the drafter, not the text"
    assert "expected 4.00" in caplog.text
    assert "is expected" not in caplog.text


async def test_all_tokens_that_the_promise_is_of_are_asked_for(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pair_under_test(tokenizer, self_test=promise(4.0, tokens=200)) as stack:
        await until(lambda: "self test: drafter toy-drafter has" in caplog.text)
        (prompt,) = {opening.prompt_length for opening in stack.draft.openings}
        blocks = stack.draft.blocks
        assert prompt + 192 <= max(block.committed_length for block in blocks) <= prompt + 200


async def test_a_collapse_is_told_with_what_may_be_the_cause(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pair_under_test(tokenizer, self_test=promise(4.0), wrong_every=1):
        await until(lambda: "another quantization" in caplog.text)
    assert "1.00 on its own prompt, where 4.00 is expected" in caplog.text


async def test_a_draft_without_a_promise_is_left_alone(tokenizer: Tokenizer) -> None:
    async with a_pair_under_test(tokenizer) as stack:
        await asyncio.sleep(0.3)
        assert stack.draft.proposals == 0


async def test_no_test_while_others_ask(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_stack(tokenizer) as stack:
        await stack.kill_draft()
        await stack.restart_draft(self_test=promise(4.0))
        stack.draft.may_answer.clear()
        busy = asyncio.create_task(stack.generate(ask(ids_of("hello"))))
        await until(lambda: bool(stack.draft.blocks), "the request to wait for its draft")
        tests = asyncio.create_task(SelfTests(stack.gateway, stack.router, quiet_s=0).run())
        await asyncio.sleep(0.3)
        assert len(stack.target.sessions) == 1
        stack.draft.may_answer.set()
        await busy
        await until(lambda: "self test: drafter" in caplog.text)
        tests.cancel()
        await stack.all_free()


async def test_a_request_ends_a_test_that_is_going_on(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_stack(tokenizer) as stack:
        await stack.kill_draft()
        await stack.restart_draft(self_test=promise(4.0))
        stack.draft.may_answer.clear()
        tests = asyncio.create_task(SelfTests(stack.gateway, stack.router, quiet_s=0).run())
        await until(lambda: len(stack.target.sessions) == 1)
        stack.draft.may_answer.set()
        stack.draft.delay_s = 0.05
        answer = asyncio.create_task(stack.generate(ask(ids_of("hello"))))
        await until(lambda: stack.gateway.counts.active == 1)
        await until(lambda: len(stack.target.sessions) == 1, "the test to be ended")
        await answer
        stack.draft.delay_s = 0.0
        await until(lambda: "self test: drafter" in caplog.text)
        tests.cancel()
        await stack.all_free()


async def test_a_fault_of_the_test_is_logged_and_ends_nothing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    async with toy_stack(tokenizer) as stack:
        monkeypatch.setattr(stack.gateway, "ask_itself", fail)
        await stack.kill_draft()
        await stack.restart_draft(self_test=promise(4.0))
        tests = asyncio.create_task(SelfTests(stack.gateway, stack.router, quiet_s=0).run())
        await until(lambda: caplog.text.count("self test of drafter toy-drafter failed") == 3)
        assert not tests.done()
        tests.cancel()


async def test_each_pair_is_tested_by_its_own_replicas(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with toy_stack(tokenizer) as stack:
        await stack.kill_draft()
        await stack.restart_draft(self_test=promise(4.0))
        await until(lambda: len(stack.router.promising_pairs()) == 1)
        ((route, name, test),) = stack.router.promising_pairs()
        pairs = [(replace(route, draft_instance_id=id_), name, test) for id_ in (b"a", b"b")]
        monkeypatch.setattr(stack.router, "promising_pairs", lambda: pairs)
        tested: list[bytes] = []
        ask_itself = stack.gateway.ask_itself

        async def ask_by(message: GenerateRequest, route: Route, time_s: float) -> GenerateComplete:
            tested.append(route.draft_instance_id)
            return await ask_itself(message, route, time_s)

        monkeypatch.setattr(stack.gateway, "ask_itself", ask_by)
        tests = asyncio.create_task(SelfTests(stack.gateway, stack.router, quiet_s=0).run())
        await until(lambda: tested == [b"a", b"b"])
        tests.cancel()
        await stack.all_free()


async def test_late_drafts_say_nothing_and_it_is_tried_three_times(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pair_under_test(tokenizer, self_test=promise(4.0), refuses_opens=True) as stack:
        await until(lambda: caplog.text.count("says nothing") == 3)
        await asyncio.sleep(0.2)
        assert caplog.text.count("says nothing") == 3
        assert "expected" not in caplog.text
        assert stack.draft.proposals == 0


def test_half_of_what_drafts_are_worth_is_a_collapse() -> None:
    assert least(1.6) == pytest.approx(1.3)
    assert least(1.0) == 1.0
