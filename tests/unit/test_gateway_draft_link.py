"""The stream to a draft: its messages in order, and nothing left of it when it breaks."""

from __future__ import annotations

import asyncio
import gc

import pytest

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


async def test_copies_go_on_while_another_proposal_tries(tokenizer: Tokenizer) -> None:
    """Three misses, then a rest, then tries: what is copied does not wait for how those go."""
    bounds = {"draft_budget_floor_ms": 50, "draft_budget_ceiling_ms": 200}
    async with toy_stack(tokenizer, **bounds) as stack:
        stack.draft.copies = 99
        stack.draft.may_answer.clear()
        missed = await stack.generate(ask(PROMPT, max_tokens=8))
        assert missed.undrafted["late"] == 3
        stack.draft.may_answer.set()
        await asyncio.sleep(0.5)  # the rest is over
        answers = await asyncio.gather(*(stack.generate(ask(PROMPT)) for _ in range(4)))
        drafted = [answer.stats.drafted_rounds for answer in answers]
        assert sum(drafted) > 0.6 * sum(answer.stats.rounds for answer in answers)


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
