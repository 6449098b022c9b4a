"""The decode loop over real gRPC: the target's tokens come out whatever the draft does."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from flashduet import rpc
from flashduet.errors import Overloaded, Unavailable
from flashduet.rpc import from_rpc_error
from flashduet.v1 import gateway_pb2, target_pb2
from flashduet.v1.common_pb2 import SamplingParams
from flashduet.v1.target_pb2_grpc import (
    TargetServiceServicer,
    add_TargetServiceServicer_to_server,
)
from gateway.target_client import TargetReplica
from gateway.tokenization import Tokenizer
from tests.support.tiny import IM_END
from tests.unit.toy_model import ids_of, plain_answer
from tests.unit.toy_stack import WAIT_S, ToyStack, ask, until

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")
EXPECTED = plain_answer(PROMPT, 40)


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
