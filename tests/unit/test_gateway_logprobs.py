"""One entry for each token that is told, spelled out, whatever happens to the text meanwhile."""

from __future__ import annotations

import grpc
import pytest

from flashduet.v1 import gateway_pb2 as pb
from tests.support.tiny import IM_END, SPECIALS
from tests.unit import toy_target
from tests.unit.toy_model import ids_of
from tests.unit.toy_stack import GeneratedAnswer, ToyStack, ask

pytest_plugins = ["tests.unit.gateway_fixtures"]

PROMPT = ids_of("hello")


def aligned(answer: GeneratedAnswer) -> None:
    for chunk in answer.chunks[0]:
        assert [entry.chosen.token_id for entry in chunk.logprobs] == list(chunk.token_ids)


@pytest.mark.parametrize("mode", ["off", "fixed"])
async def test_bytes_are_exact_where_a_token_is_part_of_a_character(
    stack: ToyStack, mode: str
) -> None:
    story = "héllo 👩‍👩‍👧"
    stack.target.script = [*ids_of(story), IM_END]
    answer = await stack.generate(ask(PROMPT, mode=mode, max_tokens=200, top_logprobs=2))
    aligned(answer)
    entries = [entry for chunk in answer.chunks[0] for entry in chunk.logprobs]
    assert b"".join(e.chosen.token_bytes for e in entries) == story.encode() + b"<|im_end|>"
    assert answer.text == story
    for entry in entries:
        assert [(t.token_id, t.logprob) for t in entry.top] == [(0, -1.0), (1, -2.0)]
        assert [t.token_bytes.decode() for t in entry.top] == SPECIALS[:2]


async def test_text_that_is_held_back_holds_back_no_entry(stack: ToyStack) -> None:
    """A stop string that is complete inside a block takes its own tokens along and no later one."""
    stack.draft.wrong_every = 1000
    stack.target.script = ids_of("ab STAB STOP and more of it")
    answer = await stack.generate(ask(PROMPT, stop=["STOP"], top_logprobs=0))
    aligned(answer)
    assert answer.text == "ab STAB "
    assert answer.token_ids == ids_of("ab STAB STOP")
    assert all(not entry.top for chunk in answer.chunks[0] for entry in chunk.logprobs)


async def test_the_budget_and_a_stop_id_cut_entries_too(stack: ToyStack) -> None:
    stack.draft.wrong_every = 1000
    stack.target.script = ids_of("a-bc!defghijk")
    for request in (
        ask(PROMPT, top_logprobs=1, stop_token_ids=ids_of("!")),
        ask(PROMPT, top_logprobs=1, max_tokens=5),
    ):
        answer = await stack.generate(request)
        aligned(answer)
        assert answer.token_ids == ids_of("a-bc!")


async def test_nobody_is_told_what_was_not_asked_for(stack: ToyStack) -> None:
    answer = await stack.generate(ask(PROMPT))
    assert not any(chunk.logprobs for chunk in answer.chunks[0])
    assert not stack.target.openings[0].HasField("top_logprobs")


async def test_a_target_that_tells_of_other_tokens_is_at_fault(
    stack: ToyStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = toy_target.toy_logprobs
    monkeypatch.setattr(
        toy_target, "toy_logprobs", lambda ids, top: whole([i + 1 for i in ids], top)
    )
    with pytest.raises(grpc.RpcError) as caught:
        await stack.generate(ask(PROMPT, top_logprobs=1))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    await stack.all_free()


async def test_more_than_the_target_tells_is_refused(stack: ToyStack) -> None:
    with pytest.raises(grpc.RpcError, match="top_logprobs: 21 given, must be from 0 to 20"):
        await stack.generate(ask(PROMPT, top_logprobs=21))
    assert isinstance(stack.gateway.served().max_top_logprobs, int)
    assert pb.GenerateRequest().top_logprobs == 0
