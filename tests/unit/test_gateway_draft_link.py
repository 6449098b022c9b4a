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


@pytest.mark.parametrize("copies", [False, True])
async def test_copies_tell_nothing_of_how_long_a_pass_takes(
    tokenizer: Tokenizer, copies: bool
) -> None:
    bounds = {"draft_budget_floor_ms": 5e3, "draft_budget_ceiling_ms": 2e4}
    async with toy_stack(tokenizer, **bounds) as stack:
        stack.draft.copies = copies
        answer = await stack.generate(ask(PROMPT))
        stats = answer.stats
        assert stats.accepted_tokens > 0
        told = (stats.copied_tokens, stats.accepted_copied_tokens)
        assert told == ((stats.drafted_tokens, stats.accepted_tokens) if copies else (0, 0))
        budgets = [block.budget_us for block in stack.draft.blocks]
        assert (budgets[-1] == budgets[0]) is copies, "passes bring the budget down, copies do not"


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
