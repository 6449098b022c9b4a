"""Several answers to one prompt: each is what it would be alone, and all of them end together."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from flashduet.errors import Overloaded, Unavailable
from flashduet.rpc import from_rpc_error
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.common_pb2 import PRIORITY_BATCH, PRIORITY_INTERACTIVE, SamplingParams
from gateway.tokenization import Tokenizer
from tests.support.tiny import IM_END
from tests.unit.toy_model import ids_of, plain_answer
from tests.unit.toy_stack import FOR_EVER_S, ToyStack, ask, toy_stack, until

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")
SEED = 2**64 - 5
SAMPLED = SamplingParams(temperature=0.8, seed=SEED)


@pytest.mark.parametrize("mode", ["off", "fixed"])
async def test_each_choice_has_its_own_noise_and_nothing_else_of_its_own(
    stack: ToyStack, mode: str
) -> None:
    answer = await stack.generate(ask(PROMPT, mode=mode, n=3, sampling=SAMPLED))
    expected = [plain_answer(PROMPT, 40, SEED, choice) for choice in range(3)]
    assert [answer.ids(choice) for choice in range(3)] == expected
    assert len(set(map(tuple, expected))) == 3
    alone = await stack.generate(ask(PROMPT, mode=mode, sampling=SAMPLED))
    assert alone.token_ids == expected[0], "the first choice is the answer of a request for one"
    assert Counter(opening.choice for opening in stack.target.openings) == {0: 2, 1: 1, 2: 1}
    assert len({opening.session_id for opening in stack.target.openings if opening.choice}) == 2
    drafted = Counter(opening.choice for opening in stack.draft.openings)
    assert drafted == ({0: 2, 1: 1, 2: 1} if mode == "fixed" else {})
    await stack.all_free()


async def test_choices_are_made_at_the_same_time(stack: ToyStack) -> None:
    stack.target.verify_delay_s = 0.02
    call = stack.stub.Generate(ask(PROMPT, n=4))
    most = 0
    async for _ in call:
        most = max(most, len(stack.target.sessions))
        assert stack.gateway.counts.active in (4, 0), "each counts as a request"
    assert most == 4


async def test_each_choice_ends_in_its_own_way_and_sums_are_of_all(stack: ToyStack) -> None:
    stack.target.cached_tokens = [4, 3, 5]
    whole = [plain_answer(PROMPT, 30, SEED, choice) for choice in range(3)]
    # A token that some of the answers have early and some do not have at all.
    stop = next(t for t in whole[1][2:12] if sum(t in ids for ids in whole) in (1, 2))
    request = ask(PROMPT, n=3, max_tokens=30, sampling=SAMPLED, stop_token_ids=[stop])
    answer = await stack.generate(request)
    for choice, ids in enumerate(whole):
        finished, cut = answer.finished[choice], stop in ids
        kept = ids[: ids.index(stop) + 1] if cut else ids
        assert answer.ids(choice) == kept
        assert finished.completion_tokens == len(kept)
        reasons = {True: pb.FINISH_REASON_STOP, False: pb.FINISH_REASON_LENGTH}
        assert finished.finish_reason == reasons[cut]
        assert finished.HasField("stop_token_id") == cut
    assert {answer.finished[choice].finish_reason for choice in range(3)} == {1, 2}
    complete = answer.complete
    assert complete.finish_reason == answer.finished[0].finish_reason
    tokens = sum(len(answer.ids(choice)) for choice in range(3))
    assert complete.usage.prompt_tokens == len(PROMPT), "the prompt is one"
    assert complete.usage.completion_tokens == tokens
    assert complete.usage.cached_tokens == 3, "what one choice computed was not there before"
    assert answer.stats.rounds == len(stack.target.verified_lengths)
    assert answer.stats.acceptance_length == pytest.approx((tokens - 3) / answer.stats.rounds)


async def test_one_choice_that_fails_ends_the_others(stack: ToyStack) -> None:
    stack.target.verify_delay_s = 0.02
    stack.target.dies_at = 3
    with pytest.raises(grpc.RpcError) as caught:
        await stack.generate(ask(PROMPT, n=3))
    assert isinstance(from_rpc_error(caught.value), Unavailable)
    await stack.all_free()
    assert stack.gateway.counts.failed == 1


async def test_a_client_that_goes_frees_all_choices(stack: ToyStack) -> None:
    stack.target.verify_delay_s = FOR_EVER_S
    call = stack.stub.Generate(ask(PROMPT, n=4))
    reading = asyncio.create_task(call.read())
    await until(lambda: len(stack.target.verified_lengths) == 4)
    call.cancel()
    await stack.all_free()
    await asyncio.gather(reading, return_exceptions=True)


async def test_choices_need_room_for_all_of_them(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, max_requests=4) as stack:
        stack.target.verify_delay_s = 0.05
        running = asyncio.create_task(stack.generate(ask(PROMPT, n=3)))
        await until(lambda: stack.gateway.counts.active == 3)
        with pytest.raises(grpc.RpcError) as caught:
            await stack.generate(ask(PROMPT, n=2))
        assert isinstance(from_rpc_error(caught.value), Overloaded)
        await stack.generate(ask(PROMPT, max_tokens=2))
        await running
        with pytest.raises(grpc.RpcError, match="from 1 to 4"):
            await stack.generate(ask(PROMPT, n=5))
        assert stack.gateway.counts.active == 0


async def test_batch_requests_leave_room_for_interactive_ones(tokenizer: Tokenizer) -> None:
    async with toy_stack(tokenizer, max_requests=3, max_batch_requests=2) as stack:
        stack.target.verify_delay_s = 0.05
        batch = ask(PROMPT, priority=PRIORITY_BATCH)
        running = [asyncio.create_task(stack.generate(batch)) for _ in range(2)]
        await until(lambda: stack.gateway.counts.active == 2)
        with pytest.raises(grpc.RpcError) as caught:
            await stack.generate(batch)
        assert isinstance(from_rpc_error(caught.value), Overloaded)
        await stack.generate(ask(PROMPT, max_tokens=2))
        await asyncio.gather(*running)
    assert [opening.priority for opening in stack.target.openings] == [
        PRIORITY_BATCH,
        PRIORITY_BATCH,
        PRIORITY_INTERACTIVE,
    ]


async def test_batch_requests_leave_sessions_of_the_target_too(stack: ToyStack) -> None:
    stack.target.verify_delay_s = 0.05
    batch = ask(PROMPT, priority=PRIORITY_BATCH)
    running = [asyncio.create_task(stack.generate(batch)) for _ in range(14)]
    await until(lambda: stack.gateway.counts.active == 14)
    with pytest.raises(grpc.RpcError, match="leave room above 14"):  # of the toy target's 16
        await stack.generate(batch)
    await stack.generate(ask(PROMPT, max_tokens=2))
    await asyncio.gather(*running)


async def test_the_draft_gets_the_prompt_and_the_target_what_the_draft_holds_of_it(
    stack: ToyStack,
) -> None:
    stack.draft.context_hit = 3
    penalized = SamplingParams(repetition_penalty=1.5, logit_bias={7: -2.0})
    answer = await stack.generate(ask(PROMPT, cache_salt="tenant", sampling=penalized))
    assert answer.stats.drafted_rounds > 0
    (at_draft,), (at_target,) = stack.draft.openings, stack.target.openings
    assert list(at_draft.token_ids) == PROMPT
    assert at_draft.cache_salt == at_target.cache_salt == "tenant"
    assert at_target.draft_context_hit == 3
    for opening in (at_draft, at_target):
        assert opening.sampling.repetition_penalty == 1.5
        assert dict(opening.sampling.logit_bias) == {7: -2.0}


async def test_a_draft_that_claims_more_than_the_prompt_is_done_without(stack: ToyStack) -> None:
    stack.draft.context_hit = len(PROMPT) + 1
    answer = await stack.generate(ask(PROMPT))
    assert answer.token_ids == plain_answer(PROMPT, 40)
    assert answer.undrafted["bad_open"] >= 38
    assert stack.target.openings[0].draft_context_hit == 0
    await stack.all_free()


async def test_an_echoed_prompt_opens_every_choice_once(
    stack: ToyStack, tokenizer: Tokenizer
) -> None:
    stack.target.script = [*ids_of("so it is"), IM_END]
    answer = await stack.generate(ask("hello, ", n=2, echo=True, block_length=2))
    for choice in range(2):
        assert answer.chunks[choice][0].text.startswith("hello, ")
        assert "".join(chunk.text for chunk in answer.chunks[choice]) == "hello, so it is"
    by_ids = await stack.generate(ask(PROMPT, echo=True))
    assert by_ids.text == "helloso it is"
