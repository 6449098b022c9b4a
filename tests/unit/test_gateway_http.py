"""Chat completions over a real HTTP connection, read by the openai SDK's own models."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.tokenization import GenerationDefaults
from tests.unit.http_support import HELLO, Http, pieces
from tests.unit.toy_model import ids_of, plain_answer
from tests.unit.toy_stack import until

pytest_plugins = ["tests.unit.gateway_fixtures"]


async def test_a_whole_answer(http: Http) -> None:
    text = http.script("Grüße, 世界 👋")
    answer = await http.chat(max_tokens=100)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage.completion_tokens == len(ids_of(text)) + 1
    assert answer.usage.prompt_tokens == len(http.stack.target.openings[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    await http.stack.all_free()


async def test_a_streamed_answer(http: Http) -> None:
    text = http.script("Grüße, 世界 👋")
    stream = await http.chat(stream=True, max_tokens=100)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    await http.stack.all_free()


async def test_every_response_object_has_the_fields_that_openai_requires(http: Http) -> None:
    """Strictly: no required field missing, no object mislabelled."""
    http.script("hi")
    body = (await http.post()).json()
    ChatCompletion.model_validate(body, strict=True)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    streamed = pieces(await http.post(stream=True, stream_options={"include_usage": True}))
    for piece in streamed:
        ChatCompletionChunk.model_validate(piece, strict=True)
        assert piece["object"] == "chat.completion.chunk"
    *before, last = streamed
    assert all(piece["usage"] is None and len(piece["choices"]) == 1 for piece in before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]


async def test_length_is_told_from_stop(http: Http) -> None:
    assert (await http.chat(max_tokens=3)).choices[0].finish_reason == "length"
    assert (await http.chat(max_completion_tokens=2)).usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_over_http(http: Http, stream: bool) -> None:
    http.script("one STOP two")
    answer = await http.chat(stop="STOP", stream=stream, max_tokens=50)
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in answer])
    else:
        text = answer.choices[0].message.content
    assert text == "one "


async def test_sampling_fields_reach_the_target(http: Http) -> None:
    await http.chat(temperature=0.7, top_p=0.9, seed=11, extra_body={"top_k": 40, "min_p": 0.05})
    sampling = http.stack.target.openings[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.7, 0.9, 11)
    assert (sampling.top_k, sampling.min_p) == (40, 0.05)
    await http.chat(seed=-1, extra_body={"top_k": -1})
    sampling = http.stack.target.openings[-1].sampling
    assert (sampling.seed, sampling.top_k) == (2**64 - 1, 0)


async def test_absent_temperature_is_openais_or_the_checkpoints(http: Http) -> None:
    await http.chat()
    assert http.stack.target.openings[-1].sampling.temperature == 1.0
    http.stack.gateway.tokenizer.defaults = GenerationDefaults(temperature=0.6, top_k=20)
    try:
        await http.chat()
        sampling = http.stack.target.openings[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)
        await http.chat(temperature=0)
        assert http.stack.target.openings[-1].sampling.temperature == 0
    finally:
        http.stack.gateway.tokenizer.defaults = GenerationDefaults()


async def test_the_answer_is_the_same_as_over_grpc_and_without_drafts(http: Http) -> None:
    for speculation in ({"mode": "off"}, {"mode": "fixed", "block_length": 4}):
        answer = await http.chat(temperature=0, extra_body={"speculation": speculation})
        prompt = list(http.stack.target.openings[-1].token_ids)
        expected = http.stack.gateway.tokenizer.decode(plain_answer(prompt, 20))
        assert answer.choices[0].message.content == expected


async def test_models_and_health(http: Http) -> None:
    (model,) = (await http.sdk.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("toy", "model", "flashduet")
    assert (await http.sdk.models.retrieve("toy")).id == "toy"
    with pytest.raises(openai.NotFoundError):
        await http.sdk.models.retrieve("other/name")
    assert (await http.raw.get("/ready")).json() == {"status": "ok"}
    await http.stack.target_server.stop(0)
    await until(lambda: http.stack.gateway.served() is None)
    assert (await http.raw.get("/ready")).status_code == 503
    # The process itself is well: a restart would help nobody.
    assert (await http.raw.get("/health")).status_code == 200
    response = await http.post()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert (await http.sdk.models.list()).data == []


async def test_echoed_and_multipart_messages(http: Http) -> None:
    first = await http.chat(max_tokens=4)
    history = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}],
        },
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "more"},
    ]
    await http.chat(messages=history)
    prompt = http.stack.gateway.tokenizer.decode(
        http.stack.target.openings[-1].token_ids, include_special_tokens=True
    )
    assert prompt.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhey<|im_end|>"
    )


async def test_request_ids_seeds_and_nothing_else_are_told_in_headers(http: Http) -> None:
    response = await http.raw.post(
        "/v1/chat/completions",
        json={"model": "toy", "messages": HELLO, "max_tokens": 2, "seed": 5},
        headers={"x-request-id": "mine-1"},
    )
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-flashduet-seed"] == "5"
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert "server" not in response.headers
