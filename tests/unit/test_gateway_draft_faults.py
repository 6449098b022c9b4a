"""What can go wrong with a draft, and the reason that is counted: the same tokens come out."""

from __future__ import annotations

import asyncio

import pytest

from flashduet.v1 import draft_pb2, gateway_pb2
from gateway import draft_link
from gateway.tokenization import Tokenizer
from tests.unit.toy_draft import BLOCK_LENGTH
from tests.unit.toy_model import ids_of, plain_answer
from tests.unit.toy_stack import (
    FOR_EVER_S,
    WAIT_S,
    GeneratedAnswer,
    ToyStack,
    ask,
    toy_stack,
    until,
)

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")
EXPECTED = plain_answer(PROMPT, 40)


def brisk(budget_ms: float) -> dict[str, float]:
    """Settings under which a draft is waited for just so long."""
    return {"draft_budget_floor_ms": budget_ms, "draft_budget_ceiling_ms": budget_ms}


async def test_without_any_draft(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, drafts="") as stack:
        answer = await stack.generate(ask(PROMPT))
        assert answer.token_ids == EXPECTED
        assert answer.undrafted == {"no_draft": 39}
        assert not stack.target.openings[0].HasField("draft_instance_id")


async def test_a_draft_that_no_target_is_attached_to(stack: ToyStack) -> None:
    stack.target.drafts.clear()
    await until(lambda: stack.router.route(drafted=True).draft is None)
    assert (await stack.generate(ask(PROMPT))).undrafted == {"no_draft": 39}


async def test_a_slow_draft_is_not_waited_for(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, **brisk(600)) as stack:
        stack.draft.may_answer.clear()
        answer = await stack.generate(ask(PROMPT))
        assert answer.token_ids == EXPECTED
        assert answer.undrafted.keys() == {"late", "resting", "last_token"}
        assert answer.undrafted["late"] >= 3
        assert answer.undrafted["resting"] >= 10, "after a few misses nobody waits"
        assert stack.draft.cancels[:3] == [1, 2, 3], "unwanted proposals are called off"
        await stack.all_free()


async def test_late_answers_are_dropped_by_their_round(tokenizer: Tokenizer) -> None:
    """Each answer comes during the next round; taken for that round's, it would be all wrong."""
    async with toy_stack(tokenizer, **brisk(100)) as stack:
        stack.draft.wrong_every = 1000
        stack.draft.delay_s = 0.17
        stack.target.verify_delay_s = 0.03
        answer = await stack.generate(ask(PROMPT))
        assert answer.token_ids == EXPECTED
        assert answer.stats.drafted_rounds == 0
        stack.draft.delay_s = stack.target.verify_delay_s = 0.0
        while not (again := await stack.generate(ask(PROMPT))).stats.drafted_tokens:
            assert again.token_ids == EXPECTED
        assert again.token_ids == EXPECTED
        assert again.stats.accepted_tokens == again.stats.drafted_tokens


@pytest.mark.parametrize(
    ("reason", "counted"),
    [
        (draft_pb2.REFUSAL_REASON_CONTEXT_LATE, "context_late"),
        (draft_pb2.REFUSAL_REASON_BEHIND_CONTEXT, "behind_context"),
        (draft_pb2.REFUSAL_REASON_INTERNAL, "internal"),
    ],
)
async def test_a_draft_that_refuses(
    stack: ToyStack, reason: draft_pb2.RefusalReason, counted: str
) -> None:
    stack.draft.refuses = reason
    answer = await stack.generate(ask(PROMPT))
    assert answer.token_ids == EXPECTED
    assert set(answer.undrafted) <= {counted, "last_token"}
    assert len(stack.draft.blocks) <= 5, "it is asked more and more rarely"
    await stack.all_free()


async def test_a_refused_session_is_drafted_again_when_the_context_is_there(
    stack: ToyStack,
) -> None:
    stack.draft.refuses = draft_pb2.REFUSAL_REASON_CONTEXT_LATE
    stack.target.may_verify.clear()
    answering = asyncio.create_task(stack.generate(ask(PROMPT)))
    await until(lambda: stack.target.verified_lengths == [1], what="a round without a draft")
    stack.draft.refuses = None
    stack.target.may_verify.set()
    answer = await answering
    assert answer.token_ids == EXPECTED
    assert answer.stats.drafted_rounds > 0


async def test_a_draft_with_no_room(stack: ToyStack) -> None:
    stack.draft.refuses_opens = True
    answer = await stack.generate(ask(PROMPT))
    assert answer.token_ids == EXPECTED
    assert answer.undrafted["open_too_many_sessions"] >= 38
    assert not stack.target.openings[0].HasField("draft_instance_id"), "no features for nobody"


async def test_a_frozen_draft_delays_one_opening_only_until_it_thaws(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, **brisk(1000)) as stack:
        stack.draft.frozen = True
        assert (await stack.generate(ask(PROMPT))).undrafted["open_late"] >= 38
        assert (await stack.generate(ask(PROMPT))).undrafted["draft_stalled"] >= 38
        # In reality the answers to the openings come out of a thawed process; here it starts anew.
        await stack.kill_draft()
        await stack.restart_draft()
        assert (await stack.generate(ask(PROMPT))).stats.drafted_rounds > 0


async def test_a_draft_that_freezes_in_mid_request(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, **brisk(600)) as stack:
        stack.draft.freezes_at = 2
        answer = await stack.generate(ask(PROMPT))
        assert answer.token_ids == EXPECTED
        assert answer.stats.drafted_rounds == 1
        assert answer.undrafted["late"] >= 3
        assert answer.undrafted["resting"] > 10


@pytest.mark.parametrize("nonsense", [[], [319] * 7, [2**32 - 1] * 7, [5] * 300])
async def test_a_draft_that_talks_nonsense(stack: ToyStack, nonsense: list[int]) -> None:
    stack.draft.nonsense = nonsense
    answer = await stack.generate(ask(PROMPT))
    assert answer.token_ids == EXPECTED
    assert max(stack.target.verified_lengths) <= BLOCK_LENGTH


async def test_context_that_is_lost_ends_drafting_for_the_session(stack: ToyStack) -> None:
    stack.target.context_lost_at = 2
    answer = await stack.generate(ask(PROMPT))
    assert answer.token_ids == EXPECTED
    assert len(stack.draft.blocks) == 2
    assert answer.undrafted["context_lost"] > 10
    stack.target.context_lost_at = None
    assert (await stack.generate(ask(PROMPT))).stats.drafted_rounds > 2


async def test_a_draft_that_dies_in_mid_request_and_comes_back(stack: ToyStack) -> None:
    stack.target.may_verify.clear()
    answer = GeneratedAnswer()
    async for response in stack.stub.Generate(ask(PROMPT)):
        answer.add(response)
        if len(answer.token_ids) == 1:
            await stack.kill_draft()
            stack.target.may_verify.set()
    assert answer.token_ids == EXPECTED
    assert answer.undrafted["draft_lost"] > 10
    assert (await stack.generate(ask(PROMPT))).undrafted == {"no_draft": 39}
    await stack.restart_draft()
    again = await stack.generate(ask(PROMPT))
    assert again.token_ids == EXPECTED
    assert again.stats.drafted_rounds > 0
    await stack.all_free()


async def test_a_draft_that_dies_while_it_is_asked(tokenizer: Tokenizer) -> None:
    """The waiting round goes on at once, not when its budget is over."""
    async with toy_stack(tokenizer, **brisk(FOR_EVER_S * 1000)) as stack:
        stack.draft.dies_at = 2
        answer = await asyncio.wait_for(stack.generate(ask(PROMPT)), WAIT_S)
        assert answer.token_ids == EXPECTED
        assert answer.undrafted["draft_lost"] > 10


async def test_one_sessions_slow_draft_holds_up_no_other(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, **brisk(FOR_EVER_S * 1000)) as stack:
        stack.draft.may_answer.clear()
        slow = asyncio.create_task(stack.generate(ask(PROMPT, max_tokens=4)))
        await until(lambda: len(stack.draft.blocks) > 0)
        assert (await stack.generate(ask(PROMPT, mode="off"))).token_ids == EXPECTED
        assert not slow.done(), "the other one is done while it still waits for its draft"
        stack.draft.may_answer.set()
        assert (await slow).token_ids == EXPECTED[:4]


async def test_many_sessions_share_one_stream_and_keep_apart(stack: ToyStack) -> None:
    prompts = [ids_of(f"prompt {index}") for index in range(12)]
    answers = await asyncio.gather(*(stack.generate(ask(prompt)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == plain_answer(prompt, 40)
        assert answer.stats.drafted_rounds > 0
    assert stack.draft.streams == 1
    await stack.all_free()


async def test_heartbeats_come_three_times_a_lease(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, lease_ms=300) as stack:
        stack.target.verify_delay_s = 0.05
        answer = await stack.generate(ask(PROMPT, max_tokens=20, block_length=2))
        assert answer.token_ids == EXPECTED[:20]
        seconds = sum(item.seconds for item in answer.stats.phases if item.phase == "verify")
        assert stack.draft.heartbeats >= seconds / 0.1 / 3, "leases last 0.3 s"
        await stack.all_free()
        beats = stack.draft.heartbeats
        await asyncio.sleep(0.25)
        assert stack.draft.heartbeats == beats, "none for sessions that are closed"


async def test_a_slow_reader_holds_up_itself_alone_and_loses_no_lease(
    tokenizer: Tokenizer,
) -> None:
    async with toy_stack(tokenizer, lease_ms=300) as stack:
        reading = asyncio.Event()
        answer = GeneratedAnswer()

        async def emit(response: gateway_pb2.GenerateResponse) -> None:
            if answer.token_ids:
                await reading.wait()
            answer.add(response)

        slow = asyncio.create_task(stack.gateway.answer(ask(PROMPT, block_length=2), emit))
        await until(lambda: bool(answer.token_ids))
        assert (await stack.generate(ask(PROMPT))).token_ids == EXPECTED
        await until(lambda: stack.draft.heartbeats >= 3, what="heartbeats for the slow reader")
        (waiting,) = stack.target.sessions.values()
        assert len(waiting.ids) < len(PROMPT) + 40, "what nobody reads is not made"
        reading.set()
        await slow
        assert answer.token_ids == EXPECTED
        assert answer.stats.drafted_rounds > 0
        await stack.all_free()


async def test_a_draft_that_stops_reading_is_cut_off_and_taken_up_again(
    stack: ToyStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_link, "_MOST_UNSENT", 50)
    answer = GeneratedAnswer()
    async for response in stack.stub.Generate(ask(PROMPT)):
        answer.add(response)
        if len(answer.token_ids) == 1:
            (session,) = stack.router.route(drafted=True).draft._link.sessions.values()
            for _ in range(100):
                session.heartbeat()
            await until(lambda: stack.router.route(drafted=True).draft is None)
    assert answer.token_ids == EXPECTED
    assert answer.undrafted["draft_lost"] > 10
    await stack.drafted()
    assert (await stack.generate(ask(PROMPT))).stats.drafted_rounds > 0
