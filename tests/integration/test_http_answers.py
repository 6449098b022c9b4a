"""The HTTP API over real services: what the parts say of each other must agree."""

from __future__ import annotations

from contextlib import suppress

import httpx
import pytest

from tests.support.pair import Pair, wait_until

PROMPTS = ["once upon a time", "hello there"]


@pytest.fixture
def http(pair: Pair):
    with httpx.Client(base_url=pair.http, timeout=240) as client:
        yield client


def complete(http: httpx.Client, **fields: object) -> dict:
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "max_tokens": 8, "temperature": 1, "seed": 11, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def said(body: dict) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def test_a_batch_says_what_its_prompts_say_alone(http, pair):
    alone = [said(complete(http, prompt=prompt, n=2)) for prompt in PROMPTS]
    for speculation in ({"mode": "off"}, {"mode": "fixed", "block_length": 4}):
        together = complete(http, prompt=PROMPTS, n=2, speculation=speculation)
        assert said(together) == alone[0] + alone[1]
    assert len(set(said(together))) == 4
    pair.assert_nothing_left()


def test_logprobs_do_not_depend_on_drafting_and_belong_to_the_choice(http):
    found = [
        complete(http, prompt=PROMPTS[0], temperature=0, logprobs=3, speculation=speculation)
        for speculation in ({"mode": "off"}, {"mode": "fixed"})
    ]
    plain, drafted = (body["choices"][0]["logprobs"] for body in found)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-4)
    for token, logprob, top in zip(
        plain["tokens"], plain["token_logprobs"], plain["top_logprobs"], strict=True
    ):
        # Greedy, without penalties: what is chosen is the most likely.
        assert top[token] == logprob == max(top.values())
    biased = complete(http, prompt=PROMPTS[0], temperature=0, logit_bias={"70": 100}, logprobs=0)
    assert len(set(biased["choices"][0]["logprobs"]["tokens"])) == 1


def test_a_prompt_asked_again_is_found_again_except_under_another_salt(http):
    prompt = "the same long beginning of a prompt " * 6
    # In mode auto the gateway may let the draft rest, which then has nothing of the prompt.
    first, again, other = (
        complete(http, prompt=prompt, cache_salt=salt, n=1, speculation={"mode": "fixed"})
        for salt in ("one", "one", "two")
    )
    cached = [
        body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, again, other)
    ]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert said(first) == said(again) == said(other)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_nothing_on_any_service(http, pair, stream):
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPTS, "n": 2, "max_tokens": 400, "ignore_eos": True}
    with httpx.Client(base_url=pair.http) as leaving:
        if stream:
            with leaving.stream(
                "POST", "/v1/completions", json={**body, "stream": True}, timeout=60
            ) as response:
                next(response.iter_lines())
        else:
            # Sooner than four times 400 tokens are there, on any machine that runs tests.
            with suppress(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=httpx.Timeout(120, read=0.3))
    pair.assert_nothing_left()
    wait_until(lambda: "answers_active 0.0" in http.get("/metrics").text, "no active answers")
