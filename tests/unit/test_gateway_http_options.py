"""What a chat completion can be asked for, and what it tells of itself."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from flashduet.v1.common_pb2 import PRIORITY_BATCH
from tests.support.tiny import IM_END, IM_START
from tests.unit.http_support import CHAT, HELLO, Http, pieces, texts
from tests.unit.toy_model import ids_of, plain_answer

pytest_plugins = ["tests.unit.gateway_fixtures"]


async def test_the_penalties_and_the_bias_reach_the_target(http: Http) -> None:
    await http.chat(
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"7": 100, "9": -2.5},
        extra_body={"repetition_penalty": 1.25},
    )
    sampling = http.stack.target.openings[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    assert sampling.repetition_penalty == 1.25
    assert dict(sampling.logit_bias) == {7: 100, 9: -2.5}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_differ_by_their_noise_alone(http: Http, stream: bool) -> None:
    response = await http.post(n=3, seed=5, temperature=1, max_tokens=7, stream=stream)
    prompt = list(http.stack.target.openings[-1].token_ids)
    expected = [
        http.stack.gateway.tokenizer.decode(plain_answer(prompt, 7, seed=5, choice=choice))
        for choice in range(3)
    ]
    assert len(set(expected)) == 3
    if stream:
        streamed = pieces(response)
        assert texts(streamed, choices=3) == expected
        ends = [c for piece in streamed for c in piece["choices"] if c["finish_reason"]]
        assert sorted(end["index"] for end in ends) == [0, 1, 2]
        opening = [c["index"] for piece in streamed for c in piece["choices"]
                   if "role" in c["delta"]]  # fmt: skip
        assert opening == [0, 1, 2]
    else:
        body = response.json()
        assert [choice["message"]["content"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 21
        assert body["usage"]["prompt_tokens"] == len(prompt)
    await http.stack.all_free()


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_chat(http: Http, stream: bool) -> None:
    text = http.script("aü👋")
    fields = {"logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await http.post(**fields)
    if stream:
        found = pieces(response)
        for piece in found:
            ChatCompletionChunk.model_validate(piece, strict=True)
        choices = [choice for piece in found for choice in piece["choices"]]
        content = [p for c in choices if c["logprobs"] for p in c["logprobs"]["content"]]
    else:
        (choice,) = ChatCompletion.model_validate(response.json(), strict=True).choices
        content = choice.model_dump()["logprobs"]["content"]
    *said, end = content
    assert bytes(byte for position in said for byte in position["bytes"]) == text.encode()
    assert (said[0]["token"], said[1]["token"]) == ("a", "bytes:\\xc3")
    assert (end["token"], end["logprob"]) == ("<|im_end|>", -0.5)
    assert [[top["logprob"] for top in position["top_logprobs"]] for position in content] == (
        [[-1, -2]] * len(content)
    )
    assert (await http.post(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0][
        "top_logprobs"
    ] == []


@pytest.mark.parametrize("asked", [True, False, None])
async def test_the_drafter_alone_may_be_asked_for(http: Http, asked: bool | None) -> None:
    assert (await http.post(speculation={"drafter_only": asked})).is_success
    assert http.stack.draft.openings[-1].drafter_only == bool(asked)


async def test_an_answer_tells_how_it_came_about(http: Http) -> None:
    fields = {"temperature": 0, "speculation": {"mode": "fixed", "block_length": 4}, "seed": 3}
    body = (await http.post(**fields)).json()
    stats = body["flashduet"]
    assert stats["rounds"] == len(http.stack.target.verified_lengths)
    assert stats["acceptance_length"] == pytest.approx(19 / stats["rounds"])
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert (stats["copied_tokens"], stats["accepted_copied_tokens"]) == (0, 0)
    assert stats["drafted_rounds"] + sum(stats["undrafted_rounds"].values()) == stats["rounds"]
    assert {"prefill", "propose", "verify", "verify.forward"} <= stats["seconds"].keys()
    assert stats["seeds"] == [3]
    assert stats["trace_id"] is None
    assert "meta_info" not in body

    for usage in (False, True):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        *before, last = pieces(await http.post(stream=True, **options, **fields))
        assert last["flashduet"]["rounds"] == stats["rounds"]
        assert not any("flashduet" in piece for piece in before)
        assert ("usage" in last) is usage


@pytest.mark.parametrize("stream", [False, True])
async def test_meta_info_is_told_as_benchmark_clients_read_it(http: Http, stream: bool) -> None:
    response = await http.post(return_meta_info=True, chat_template_kwargs={}, stream=stream)
    body = pieces(response)[-1] if stream else response.json()
    meta = body["meta_info"]
    assert meta["spec_verify_ct"] == body["flashduet"]["rounds"] > 0
    assert meta["spec_accept_length"] == body["flashduet"]["acceptance_length"] > 1
    assert meta["finish_reason"] == {"type": "length", "length": 20}
    assert (meta["completion_tokens"], meta["id"]) == (20, body["id"])
    assert meta["e2e_latency"] > 0
    alone = await http.post(return_meta_info=True, max_tokens=1)
    assert "spec_accept_length" not in alone.json()["meta_info"]
    http.script("x STOP")
    stopped = await http.post(return_meta_info=True, stop="STOP")
    assert stopped.json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP"}


async def test_what_was_found_again_is_part_of_the_usage(http: Http) -> None:
    http.stack.target.cached_tokens = [4]
    usage = (await http.chat()).usage
    assert usage.prompt_tokens_details.cached_tokens == 4


async def test_priority_salt_and_special_tokens_reach_the_core(http: Http) -> None:
    await http.post(priority="batch", cache_salt="mine")
    opening = http.stack.target.openings[-1]
    assert (opening.priority, opening.cache_salt) == (PRIORITY_BATCH, "mine")
    await http.post(service_tier="flex")
    assert http.stack.target.openings[-1].priority == PRIORITY_BATCH
    await http.post(service_tier="priority")
    assert http.stack.target.openings[-1].priority != PRIORITY_BATCH
    http.stack.target.script = [IM_START, *ids_of("a"), IM_END]
    for skip, text in ((True, "a"), (None, "a"), (False, "<|im_start|>a")):
        body = (await http.post(skip_special_tokens=skip)).json()
        assert body["choices"][0]["message"]["content"] == text


async def test_variables_reach_the_chat_template(http: Http) -> None:
    tokenizer = http.stack.gateway.tokenizer
    before = tokenizer._tokenizer.chat_template
    tokenizer._tokenizer.chat_template = "{{ deep.steps }}|{{ enable_thinking }}"
    try:
        body = {"chat_template_kwargs": {"enable_thinking": False, "deep": {"steps": 3}}}
        assert (await http.post(**body)).status_code == 200
        prompt = tokenizer.decode(http.stack.target.openings[-1].token_ids)
        assert prompt == "3|False"
        refused = await http.post(chat_template_kwargs={"tools": []})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "chat_template_kwargs.tools"
        deep = {"a": 1}
        for _ in range(90):
            deep = {"a": [deep]} if len(str(deep)) % 2 else {"a": deep}
        for odd in ({"a": [10**400]}, deep):
            response = await http.post(chat_template_kwargs=odd)
            assert response.json()["error"]["param"] == "chat_template_kwargs"
        plain = {"deep": {"steps": [[1.5, None, "x", True]]}}
        assert (await http.post(chat_template_kwargs=plain)).status_code == 200
        prompt = tokenizer.decode(http.stack.target.openings[-1].token_ids)
        assert prompt == "[[1.5, None, 'x', True]]|"
        infinite = '{"model": "toy", "messages": %s, "chat_template_kwargs": {"a": 1e999}}'
        response = await http.raw.post(CHAT, content=infinite % json.dumps(HELLO))
        assert response.json()["error"]["param"] == "chat_template_kwargs"
    finally:
        tokenizer._tokenizer.chat_template = before
