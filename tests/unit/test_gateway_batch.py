"""Batch requests: plain steps come several at a time, and nothing else changes."""

from __future__ import annotations

from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.common_pb2 import PRIORITY_BATCH, PRIORITY_INTERACTIVE
from tests.support.tiny import IM_END
from tests.unit.toy_model import ids_of, plain_answer
from tests.unit.toy_stack import GeneratedAnswer, ToyStack, ask

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")
EXPECTED = plain_answer(PROMPT, 40)


async def batch(stack: ToyStack, **fields: object) -> GeneratedAnswer:
    return await stack.generate(ask(PROMPT, mode="off", priority=PRIORITY_BATCH, **fields))


async def test_undrafted_steps_come_together(stack: ToyStack) -> None:
    answer = await batch(stack)
    assert answer.token_ids == EXPECTED
    assert len(stack.target.verified_lengths) == 3, "16, 16 and the last 7"
    assert (answer.stats.rounds, answer.undrafted) == (39, {"off": 39}), "each is a round"
    assert answer.stats.acceptance_length == 1
    assert (await batch(stack, max_tokens=2)).token_ids == EXPECTED[:2]
    assert (await batch(stack, max_tokens=1)).token_ids == EXPECTED[:1]
    await stack.all_free()


async def test_whoever_waits_for_tokens_gets_them_one_by_one(stack: ToyStack) -> None:
    interactive = ask(PROMPT, mode="off", priority=PRIORITY_INTERACTIVE)
    assert (await stack.generate(interactive)).token_ids == EXPECTED
    assert len(stack.target.verified_lengths) == 39
    assert [verify.more_steps for verify in stack.target.verifies] == [31, 6], "one message for 32"
    assert all(verify.one_by_one for verify in stack.target.verifies)


async def test_steps_that_come_by_themselves_end_with_the_answer(stack: ToyStack) -> None:
    script = ids_of("some words: and many more of them, which nobody wants to hear any more")
    stack.target.script = script
    wanted = script[: len(ids_of("some words:"))]
    for stop in ({"stop": [":"]}, {"stop_token_ids": ids_of(":")}):
        answer = await stack.generate(ask(PROMPT, mode="off", max_tokens=60, **stop))
        assert answer.token_ids == wanted
        assert answer.stats.rounds == len(wanted) - 1
        await stack.all_free()


async def test_a_target_that_gives_steps_together_is_understood(stack: ToyStack) -> None:
    stack.target.knows_one_by_one = False
    for _ in range(2):
        answer = await stack.generate(ask(PROMPT, mode="off"))
        assert answer.token_ids == EXPECTED
        assert answer.stats.rounds == 39
    await stack.all_free()


async def test_a_batch_request_is_drafted_until_its_draft_is_lost(stack: ToyStack) -> None:
    stack.target.context_lost_at = 2
    answer = await stack.generate(ask(PROMPT, priority=PRIORITY_BATCH))
    assert answer.token_ids == EXPECTED
    assert answer.stats.drafted_rounds == 2
    assert len(stack.target.verified_lengths) <= 5
    assert answer.stats.rounds == answer.undrafted["context_lost"] + 2


async def test_steps_past_a_stop_count_in_nothing(stack: ToyStack) -> None:
    stack.target.script = [*ids_of("ab STOP and more of it"), IM_END, *ids_of("never seen")]
    by_string = await batch(stack, stop=["STOP"], top_logprobs=0)
    assert (by_string.text, by_string.token_ids) == ("ab ", ids_of("ab STOP"))
    told = [e.chosen.token_id for chunk in by_string.chunks[0] for e in chunk.logprobs]
    assert told == by_string.token_ids
    assert by_string.stats.rounds == len(by_string.token_ids) - 1
    by_id = await batch(stack)
    assert by_id.token_ids == stack.target.script[: len("ab STOP and more of it") + 1]
    assert by_id.complete.finish_reason == pb.FINISH_REASON_STOP
