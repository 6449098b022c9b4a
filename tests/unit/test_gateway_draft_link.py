"""The stream to a draft: its messages in order, and nothing left of it when it breaks."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import pytest

from flashduet.v1 import draft_pb2 as pb
from gateway.budget import BudgetLimits, LatencyBudget
from gateway.draft_session import DraftSession
from gateway.tokenization import Tokenizer
from tests.unit.toy_model import ids_of, plain_answer
from tests.unit.toy_stack import ask, toy_stack, until

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")


@pytest.mark.parametrize("copies", [0, 3, 99])
async def test_copies_tell_nothing_of_how_long_a_pass_takes(
    tokenizer: Tokenizer, copies: int
) -> None:
    bounds = {"draft_budget_floor_ms": 5e3, "draft_budget_ceiling_ms": 2e4}
    async with toy_stack(tokenizer, **bounds) as stack:
        stack.draft.copies = copies
        answer = await stack.generate(ask(PROMPT))
        stats = answer.stats
        assert stats.accepted_tokens > 0
        told = (stats.copied_tokens, stats.accepted_copied_tokens)
        if copies == 3:
            # The toy is right up to one of its slots: the copied ones behind that are not accepted.
            assert 0 < told[1] < told[0] < stats.drafted_tokens
            assert told[1] < stats.accepted_tokens
        else:
            whole = (stats.drafted_tokens, stats.accepted_tokens)
            assert told == (whole if copies else (0, 0))
        budgets = [block.budget_us for block in stack.draft.blocks]
        unmoved = budgets[-1] == budgets[0]
        assert unmoved is (copies == 99), "passes bring the budget down, copies do not"


async def answered(session: DraftSession, round_: int, copied: int) -> None:
    """A proposal of two tokens, so many of them copied."""
    asking = asyncio.create_task(session.propose(round_, 9, 5, 3, ""))
    await asyncio.sleep(0)
    proposal = pb.Proposal(round=round_, token_ids=[1, 2], copied_tokens=copied)
    session.receive(pb.ProposeResponse(proposal=proposal))
    assert (await asking).copied_tokens == copied


async def test_copies_go_on_while_another_proposal_tries() -> None:
    """After misses and a rest one proposal tries at a time; what is copied waits for no pass."""
    clock = SimpleNamespace(now=0.0)
    budget = LatencyBudget(BudgetLimits(floor_s=60.0, ceiling_s=60.0), lambda: clock.now)
    link = SimpleNamespace(budget=budget, send=lambda _: None, valid=lambda _: True)
    copier, other, third = (
        DraftSession(link, bytes([number] * 16), pb.ProposeOpen())  # type: ignore[arg-type]
        for number in range(3)
    )
    await answered(copier, 1, copied=2)
    for _ in range(3):
        budget.missed()
    assert copier.unavailable(2) == "resting", "nobody asks in a rest"
    clock.now += 10
    trying = asyncio.create_task(other.propose(1, 9, 5, 3, ""))
    await asyncio.sleep(0)
    assert (third.unavailable(1), copier.unavailable(2)) == ("resting", "")
    await answered(copier, 2, copied=2)
    assert third.unavailable(1) == "resting", "a copy does not end another's try"
    other.receive(pb.ProposeResponse(proposal=pb.Proposal(round=1, token_ids=[1, 2])))
    await trying
    assert not third.unavailable(1)


async def test_a_stream_that_breaks_leaves_no_task_behind(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_stack(tokenizer) as stack:
        assert (await stack.generate(ask(PROMPT))).stats.drafted_rounds > 0
        await stack.kill_draft()
        await until(lambda: stack.router.route(drafted=True).draft is None)
        assert (await stack.generate(ask(PROMPT))).token_ids == plain_answer(PROMPT, 40)
        await stack.restart_draft()
        assert (await stack.generate(ask(PROMPT))).stats.drafted_rounds > 0
        named = [task.get_name() for task in asyncio.all_tasks()]
        assert named.count("draft-messages") == named.count("draft-heartbeats") == 1
        gc.collect()
        await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert "was destroyed" not in caplog.text
