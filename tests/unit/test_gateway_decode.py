"""The decode loop over real gRPC: the target's tokens come out whatever the draft does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from flashduet import rpc
from flashduet.errors import Overloaded, Unavailable
from flashduet.rpc import from_rpc_error
from flashduet.v1 import draft_pb2, gateway_pb2, target_pb2
from flashduet.v1.common_pb2 import SamplingParams
from flashduet.v1.target_pb2_grpc import (
    TargetServiceServicer,
    add_TargetServiceServicer_to_server,
)
from gateway import draft_link
from gateway.target_client import TargetReplica
from gateway.tokenization import Tokenizer
from tests.support.tiny import IM_END
from tests.unit.toy_draft import BLOCK_LENGTH
from tests.unit.toy_model import ids_of, plain_answer, tokenizer_folder
from tests.unit.toy_stack import (
    FOR_EVER_S,
    WAIT_S,
    GeneratedAnswer,
    ToyStack,
    ask,
    toy_stack,
    until,
)

PROMPT = ids_of("hello")


def brisk(budget_ms: float) -> dict[str, float]:
    """Settings under which a draft is waited for just so long."""
    return {"draft_budget_floor_ms": budget_ms, "draft_budget_ceiling_ms": budget_ms}


EXPECTED = plain_answer(PROMPT, 40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_folder(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest_asyncio.fixture
async def stack(tokenizer: Tokenizer) -> AsyncIterator[ToyStack]:
    async with toy_stack(tokenizer) as running:
        yield running


@pytest.mark.parametrize(
    ("mode", "block_length"),
    [("off", None), ("fixed", 2), ("fixed", 8), ("fixed", 16), ("auto", 5)],
)
async def test_drafting_changes_no_token(
    stack: ToyStack, mode: str, block_length: int | None
) -> None:
    for _ in range(2):
        answer = await stack.generate(ask(PROMPT, mode=mode, block_length=block_length))
        assert answer.token_ids == EXPECTED
        assert answer.complete.finish_reason == gateway_pb2.FINISH_REASON_LENGTH
    await stack.all_free()


async def test_sampled_tokens_depend_on_the_seed_alone(stack: ToyStack) -> None:
    sampled = SamplingParams(temperature=0.8, seed=2**64 - 3)
    expected = plain_answer(PROMPT, 40, seed=2**64 - 3)
    assert expected != EXPECTED
    for mode, wrong_every in [("off", 5), ("fixed", 2), ("fixed", 1000)]:
        stack.draft.wrong_every = wrong_every
        assert (
            await stack.generate(ask(PROMPT, mode=mode, sampling=sampled))
        ).token_ids == expected


async def test_a_request_without_a_seed_is_told_the_one_it_got(stack: ToyStack) -> None:
    free = await stack.generate(ask(PROMPT, sampling=SamplingParams(temperature=1.0)))
    same = SamplingParams(temperature=1.0, seed=free.started.seed)
    assert (await stack.generate(ask(PROMPT, sampling=same))).token_ids == free.token_ids
    assert stack.target.openings[0].sampling.seed == free.started.seed


async def test_what_the_draft_is_asked_for(stack: ToyStack) -> None:
    """Block lengths stay within the tokens still wanted; the toy draft checks the rest."""
    stack.draft.wrong_every = 1000
    answer = await stack.generate(ask(PROMPT, max_tokens=20))
    assert answer.token_ids == EXPECTED[:20]
    # 19 tokens after the first: blocks of 8, 8 and 3 commit exactly them.
    assert [block.block_length for block in stack.draft.blocks] == [8, 8, 3]
    assert [block.round for block in stack.draft.blocks] == [1, 2, 3]
    assert stack.target.verified_lengths == [8, 8, 3]
    assert answer.stats.rounds == 3
    assert answer.stats.drafted_tokens == answer.stats.accepted_tokens == 16
    assert answer.stats.acceptance_length == pytest.approx(19 / 3)


async def test_drafts_verified_past_a_stop_count_in_nothing(stack: ToyStack) -> None:
    stack.draft.wrong_every = 1000
    stack.target.script = ids_of("a-bc!defghijk")
    answer = await stack.generate(ask(PROMPT, stop_token_ids=ids_of("!")))
    assert answer.token_ids == ids_of("a-bc!")
    assert stack.target.verified_lengths == [8], "more was verified and accepted"
    assert (answer.stats.accepted_tokens, answer.stats.acceptance_length) == (4, 4)


async def test_a_single_wanted_token_is_a_plain_step(stack: ToyStack) -> None:
    answer = await stack.generate(ask(PROMPT, max_tokens=2))
    assert answer.token_ids == EXPECTED[:2]
    assert answer.undrafted == {"last_token": 1}
    assert not stack.draft.blocks


async def test_one_token_needs_no_round(stack: ToyStack) -> None:
    answer = await stack.generate(ask(PROMPT, max_tokens=1))
    assert answer.token_ids == EXPECTED[:1]
    assert (answer.stats.rounds, answer.stats.acceptance_length) == (0, 0)


async def test_the_pieces_add_up_and_usage_counts_them(
    stack: ToyStack, tokenizer: Tokenizer
) -> None:
    story = "नमस्ते 👩‍👩‍👧 你好"
    stack.target.script = [*ids_of(story), IM_END]
    answer = await stack.generate(ask(PROMPT, max_tokens=200))
    assert answer.text == story
    assert answer.token_ids == stack.target.script, "the stop token is part of the ids"
    assert answer.complete.finish_reason == gateway_pb2.FINISH_REASON_STOP
    assert answer.complete.stop_token_id == IM_END
    assert answer.complete.usage.prompt_tokens == len(PROMPT)
    assert answer.complete.usage.completion_tokens == len(stack.target.script)
    assert "\ufffd" not in "".join(answer.texts)


async def test_the_first_token_is_checked_for_stop_too(stack: ToyStack) -> None:
    stack.target.script = [IM_END]
    answer = await stack.generate(ask(PROMPT))
    assert (answer.token_ids, answer.text, answer.stats.rounds) == ([IM_END], "", 0)
    assert answer.complete.finish_reason == gateway_pb2.FINISH_REASON_STOP
    await stack.all_free()


async def test_ignore_eos_and_own_stop_ids(stack: ToyStack) -> None:
    stop = ids_of("!")[0]
    stack.target.script = [*ids_of("ab"), IM_END, *ids_of("cd!ef")]
    answer = await stack.generate(ask(PROMPT, ignore_eos=True, stop_token_ids=[stop]))
    assert answer.text == "abcd"
    assert answer.complete.stop_token_id == stop
    shown = ask(PROMPT, ignore_eos=True, stop_token_ids=[stop], include_special_tokens=True)
    assert (await stack.generate(shown)).text == "ab<|im_end|>cd"


@pytest.mark.parametrize("mode", ["off", "fixed"])
async def test_a_stop_string_never_leaks(stack: ToyStack, mode: str) -> None:
    stack.target.script = ids_of("The answer. STAB, then STOP and more")
    answer = await stack.generate(ask(PROMPT, mode=mode, stop=["STOP", "never"]))
    assert answer.text == "The answer. STAB, then "
    assert answer.complete.stop_string == "STOP"
    assert answer.token_ids == ids_of("The answer. STAB, then STOP")
    sent = ""
    for text in answer.texts:
        sent += text
        assert "The answer. STAB, then ".startswith(sent)


async def test_every_phase_is_accounted_for(stack: ToyStack) -> None:
    stats = (await stack.generate(ask(PROMPT))).stats
    seconds = {item.phase: item.seconds for item in stats.phases}
    inside = [f"{outer}.{inner}" for outer in ("prefill", "verify")
              for inner in ("queue", "forward", "sample", "publish")]  # fmt: skip
    inside += [f"propose.{inner}" for inner in ("queue", "context_wait", "forward", "sample")]
    assert set(seconds) == {"admit", "prefill", "propose", "verify", "accept", *inside}
    assert seconds["verify.forward"] == pytest.approx(stats.rounds * 1000e-6)
    assert seconds["propose.forward"] == pytest.approx(stats.drafted_rounds * 200e-6)


# What can go wrong with a draft, and the reason that is counted.


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


# What can go wrong with the target ends the request, and frees the draft.


async def test_a_target_that_dies_ends_the_request_as_unavailable(stack: ToyStack) -> None:
    stack.target.dies_at = 2
    with pytest.raises(grpc.RpcError) as caught:
        await stack.generate(ask(PROMPT))
    assert isinstance(from_rpc_error(caught.value), Unavailable)
    await stack.all_free()
    stack.target.dies_at = None
    await until(lambda: stack.gateway.served() is not None)
    assert (await stack.generate(ask(PROMPT))).token_ids == EXPECTED


async def test_a_full_target_is_overload_with_its_own_retry_time(stack: ToyStack) -> None:
    stack.target.refusal = Overloaded("16 sessions are open", 2.5)
    with pytest.raises(grpc.RpcError) as caught:
        await stack.generate(ask(PROMPT))
    error = from_rpc_error(caught.value)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.5
    await stack.all_free()


class _Refusing(TargetServiceServicer):
    """Ends every stream before it has read from it."""

    async def Decode(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        raise Overloaded("no room", 2.0)


async def test_a_write_that_meets_the_streams_end_is_no_fault_of_ours() -> None:
    """grpc.aio answers it with INTERNAL instead of the target's status."""
    server = rpc.Server([])
    add_TargetServiceServicer_to_server(_Refusing(), server.grpc)
    await server.start("127.0.0.1:0")
    replica = TargetReplica(f"127.0.0.1:{server.port}", 60)
    kinds = set()
    for number in range(300):
        session = replica.session()
        await asyncio.sleep(number % 50 / 10_000)
        with pytest.raises((Overloaded, Unavailable)) as caught:
            await asyncio.wait_for(session.open(target_pb2.DecodeOpen(), ""), WAIT_S)
        kinds.add(type(caught.value))
        session.abandon()
    assert Overloaded in kinds
    assert replica.sessions == 0
    await replica._channel.close()
    await server.stop(0)
