"""Completions: prompts of every form, batches, echo and logprobs."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from openai.types import Completion

from flashduet.errors import Overloaded
from tests.unit.http_support import Http, pieces, texts
from tests.unit.toy_model import ids_of, plain_answer
from tests.unit.toy_stack import until

pytest_plugins = ["tests.unit.gateway_fixtures"]

# Texts that the tiny tokenizer reads byte by byte.
FORMS = [
    ("a word", ["a word"]),
    (["a word"], ["a word"]),
    (["a text", "b text"], ["a text", "b text"]),
    (ids_of("a word"), ["a word"]),
    ([ids_of("a text"), ids_of("b text")], ["a text", "b text"]),
]


def plain(http: Http, prompt: str, **how: int) -> str:
    """What the toy target alone says after the prompt."""
    return http.stack.gateway.tokenizer.decode(plain_answer(ids_of(prompt), 6, **how))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "prompts"), FORMS)
async def test_a_prompt_may_have_any_form(
    http: Http, prompt: object, prompts: list[str], stream: bool
) -> None:
    response = await http.post_completion(prompt=prompt, temperature=0, max_tokens=6, stream=stream)
    expected = [plain(http, text) for text in prompts]
    if stream:
        found = pieces(response)
        for piece in found:
            assert piece["object"] == "text_completion"
            # The SDK reads pieces with the same model, which knows no choice that goes on.
            ended = [{**choice, "finish_reason": "stop"} for choice in piece["choices"]]
            Completion.model_validate({**piece, "choices": ended}, strict=True)
        assert texts(found, choices=len(prompts)) == expected
    else:
        body = Completion.model_validate(response.json(), strict=True)
        assert [choice.text for choice in body.choices] == expected
        assert body.id.startswith("cmpl-")
        assert body.usage.prompt_tokens == sum(len(text) for text in prompts)
        assert body.usage.completion_tokens == 6 * len(prompts)
        assert {choice.finish_reason for choice in body.choices} == {"length"}
    await http.stack.all_free()


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_a_batch_are_numbered_prompt_after_prompt(
    http: Http, stream: bool
) -> None:
    fields = {"prompt": ["ab", "cd"], "n": 2, "seed": 9, "max_tokens": 6, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await http.post_completion(**fields, **options)
    expected = [plain(http, prompt, seed=9, choice=n) for prompt in ("ab", "cd") for n in (0, 1)]
    assert len(set(expected)) == 4
    if stream:
        found = pieces(response)
        assert texts(found, choices=4) == expected
        last = found[-1]
        assert sum("flashduet" in piece for piece in found) == 1
    else:
        last = response.json()
        assert [choice["text"] for choice in last["choices"]] == expected
        assert [choice["index"] for choice in last["choices"]] == [0, 1, 2, 3]
    assert last["usage"]["completion_tokens"] == 24
    assert last["usage"]["prompt_tokens"] == 4
    assert last["flashduet"]["seeds"] == [9, 9]


async def test_texts_of_a_batch_get_seeds_of_their_own(http: Http) -> None:
    body = (await http.post_completion(prompt=["a", "a"])).json()
    first, second = body["choices"]
    assert first["text"] != second["text"]
    assert len(set(body["flashduet"]["seeds"])) == 2


async def test_a_large_batch_is_answered_a_few_at_a_time(http: Http) -> None:
    # The gateway's own limit is 4 answers at a time here.
    for n in (1, 2):
        fields = {"prompt": [f"{number}" for number in range(9)], "max_tokens": 3, "n": n}
        assert len((await http.post_completion(**fields)).json()["choices"]) == 9 * n
    refused = await http.post_completion(prompt=["a"] * 129)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"


async def test_a_batch_that_finds_no_room_for_some_of_it_waits(http: Http) -> None:
    http.stack.target.verify_delay_s = 0.2
    other = asyncio.create_task(http.post(n=2, max_tokens=10, speculation={"mode": "off"}))
    await until(lambda: http.stack.gateway.counts.active == 2)
    body = (await http.post_completion(prompt=["a", "b", "c", "d"], max_tokens=3)).json()
    assert len(body["choices"]) == 4
    assert http.stack.gateway.counts.failed > 0, "some were refused at first"
    assert (await other).status_code == 200
    http.stack.target.refusal = Overloaded("16 sessions are open", 1.0)
    assert (await http.post_completion(prompt=["a", "b", "c"])).status_code == 429


async def test_nothing_of_a_batch_is_answered_if_one_prompt_cannot_be(http: Http) -> None:
    for stream in (False, True):
        response = await http.post_completion(prompt=[*[[5]] * 9, [999]], stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
    assert not http.stack.target.openings


BAD_PROMPTS = [None, "", 5, [], [[]], [""], ["a", 1], [1, "a"], [1.5], [True], [None], {"a": 1},
               [-1], [2**32], [[1], "a"], [999], [[1], []]]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
async def test_what_is_no_prompt_is_refused_by_name(http: Http, prompt: object) -> None:
    response = await http.post_completion(prompt=prompt)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"][:7]) == ("prompt", "prompt:")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_begins_with_the_prompt(http: Http, stream: bool) -> None:
    http.script("ü!")
    response = await http.post_completion(
        prompt=["Grüße ", ids_of("x")][0], echo=True, stream=stream, n=2
    )
    said = (
        texts(pieces(response), choices=2)
        if stream
        else [choice["text"] for choice in response.json()["choices"]]
    )
    assert said == ["Grüße ü!"] * 2
    refused = await http.post_completion(echo=True, logprobs=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "echo"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion(http: Http, stream: bool) -> None:
    text = http.script("aü👋b")
    response = await http.post_completion(logprobs=2, stream=stream)
    if stream:
        choices = [choice for piece in pieces(response) for choice in piece["choices"]]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        found = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        body = Completion.model_validate(response.json(), strict=True)
        found = body.choices[0].model_dump()["logprobs"]
    tokens = ["a", r"bytes:\xc3", r"bytes:\xbc"]
    tokens += [rf"bytes:\x{byte:02x}" for byte in "👋".encode()]
    assert found["tokens"] == [*tokens, "b", "<|im_end|>"]
    assert found["token_logprobs"] == [-0.5] * 9
    # Offsets are of characters; a character's later tokens begin where it does.
    assert found["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert all(later >= earlier for earlier, later in pairwise(found["text_offset"]))
    assert [text[offset : offset + 1] for offset in found["text_offset"][:2]] == ["a", "ü"]
    assert found["top_logprobs"][0] == {"a": -0.5, "<|endoftext|>": -1.0, "<|im_start|>": -2.0}
    alone = (await http.post_completion(logprobs=0)).json()["choices"][0]["logprobs"]
    assert alone["top_logprobs"][0] == {"a": -0.5}
    assert (await http.post_completion()).json()["choices"][0]["logprobs"] is None


async def test_a_completion_has_openai_s_own_length_where_none_is_asked(http: Http) -> None:
    response = await http.post_completion(max_tokens=None)
    assert response.json()["usage"]["completion_tokens"] == 16
