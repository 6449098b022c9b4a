"""Tokens, figures, and the schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashduet.errors import Overloaded
from gateway.http.chat_request import ChatCompletionRequest
from gateway.http.completion_request import CompletionRequest
from gateway.tokenization import Tokenizer
from tests.unit.http_support import HELLO, Http, serve_http
from tests.unit.toy_model import CONTEXT_WINDOW, ids_of
from tests.unit.toy_stack import ask, until

pytest_plugins = ["tests.unit.gateway_fixtures"]


async def test_tokenize_gives_what_an_answer_would_begin_from(http: Http) -> None:
    text = "Grüße 👋"
    body = (await http.raw.post("/tokenize", json={"prompt": text})).json()
    assert body == {
        "count": len(ids_of(text)),
        "max_model_len": CONTEXT_WINDOW,
        "tokens": ids_of(text),
    }
    await http.chat()
    asked = {"messages": HELLO, "model": "toy", "return_token_strs": True}
    body = (await http.raw.post("/tokenize", json=asked)).json()
    assert body["tokens"] == list(http.stack.target.openings[-1].token_ids)
    assert body["token_strs"][:2] == ["<|im_start|>", "u"]
    assert (await http.raw.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []


async def test_detokenize_gives_the_text_back(http: Http) -> None:
    text = "<|im_start|>Grüße 👋"
    tokens = (await http.raw.post("/tokenize", json={"prompt": text})).json()["tokens"]
    for skip, expected in ((None, text), (False, text), (True, "Grüße 👋")):
        asked = {"tokens": tokens, "skip_special_tokens": skip}
        assert (await http.raw.post("/detokenize", json=asked)).json() == {"prompt": expected}
    assert (await http.raw.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "odd": 1}, "odd"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_name(
    http: Http, path: str, body: dict[str, object], param: str
) -> None:
    response = await http.raw.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def figures(text: str) -> dict[str, float]:
    """Samples by name and labels, as Prometheus reads them."""
    found = re.findall(r"^(flashduet_\S+) (\S+)$", text, re.MULTILINE)
    return {name.removeprefix("flashduet_gateway_"): float(value) for name, value in found}


async def test_metrics_count_requests_of_both_protocols(http: Http) -> None:
    response = await http.raw.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert figures(response.text)["serving"] == 1
    stats = (await http.post(temperature=0)).json()["flashduet"]
    await http.stack.generate(ask("hello", max_tokens=5))
    await http.post_completion(prompt=["a", "b"], n=2, max_tokens=3)
    assert (await http.post(n=9)).status_code == 400
    http.stack.target.refusal = Overloaded("16 sessions are open", 1.0)
    assert (await http.post()).status_code == 429
    text = (await http.raw.get("/metrics")).text
    found = figures(text)
    assert found['requests_total{outcome="completed"}'] == 4
    assert found['requests_total{outcome="invalid_argument"}'] == 1
    assert found['requests_total{outcome="resource_exhausted"}'] == 1
    assert found["completion_tokens_total"] == 20 + 5 + 12
    assert found["time_to_first_token_seconds_count"] == 4
    assert found["time_between_tokens_seconds_count"] == 4
    assert found["acceptance_length_count"] == found["queue_seconds_count"] == 4
    assert found["rounds_total"] > stats["rounds"]
    assert found["drafted_tokens_total"] > found["accepted_tokens_total"] > 0
    assert found["copied_tokens_total"] == found["accepted_copied_tokens_total"] == 0
    http.stack.draft.copies, http.stack.target.refusal = 99, None
    copied = (await http.post(temperature=0)).json()["flashduet"]
    assert copied["copied_tokens"] == copied["drafted_tokens"] > 0
    assert copied["accepted_copied_tokens"] == copied["accepted_tokens"] > 0
    after = figures((await http.raw.get("/metrics")).text)
    assert after["copied_tokens_total"] == copied["copied_tokens"]
    assert after["accepted_copied_tokens_total"] == copied["accepted_copied_tokens"]
    assert found['phase_seconds_total{phase="verify"}'] > 0
    assert (found["answers_active"], found["answers_limit"]) == (0, 4)
    assert (found["serving"], found["drafting"]) == (1, 1)


async def test_metrics_name_nothing_of_the_machine_or_the_requests(
    tokenizer: Tokenizer,
) -> None:
    async with serve_http(tokenizer, api_keys="sk-one") as http:
        headers = {"authorization": "Bearer sk-one", "x-request-id": "of-alice"}
        chat = {"model": "toy", "messages": HELLO, "max_tokens": 2}
        await http.raw.post("/v1/chat/completions", json=chat, headers=headers)
        text = (await http.raw.get("/metrics", headers=headers)).text
        for secret in ("sk-one", "alice", "hello", "127.0.0.1", "toy", "/"):
            assert secret not in re.sub(r"^# .*$", "", text, flags=re.MULTILINE)


async def test_the_figures_of_what_is_under_way(http: Http) -> None:
    http.stack.target.verify_delay_s = 0.2
    task = http.stack.stub.Generate(ask("hello", max_tokens=3))
    await until(lambda: http.stack.gateway.counts.active == 1)
    assert figures((await http.raw.get("/metrics")).text)["answers_active"] == 1
    await task.read()
    task.cancel()
    await http.stack.all_free()


async def test_the_schema_names_every_route_and_error(http: Http) -> None:
    schema = (await http.raw.get("/openapi.json")).json()
    assert schema["paths"].keys() == {
        "/health", "/ready", "/metrics", "/tokenize", "/detokenize", "/v1/models",
        "/v1/models/{name}", "/v1/chat/completions", "/v1/completions",
    }  # fmt: skip
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    assert chat["responses"].keys() == {
        "200", "400", "401", "404", "408", "409", "413", "429", "500", "503", "504"
    }  # fmt: skip
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert "security" not in chat
    found = set(
        re.findall(r'"#/components/schemas/(\w+)"', (await http.raw.get("/openapi.json")).text)
    )
    assert found <= schema["components"]["schemas"].keys()
    asked = schema["components"]["schemas"]["ChatCompletionRequest"]
    assert asked["additionalProperties"] == {"type": "null"}
    assert asked["properties"]["tools"]["description"].startswith("Not supported")


async def test_the_schema_says_where_a_key_is_needed(tokenizer: Tokenizer) -> None:
    async with serve_http(tokenizer, api_keys="sk-one") as http:
        schema = (await http.raw.get("/openapi.json")).json()
        assert schema["paths"]["/metrics"]["get"]["security"] == [{"ApiKey": []}]
        assert "security" not in schema["paths"]["/health"]["get"]
        assert schema["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"


def test_the_documentation_lists_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    listed = set(re.findall(r"`([a-z_0-9.]+)`", text))
    for model in (ChatCompletionRequest, CompletionRequest):
        assert model.model_fields.keys() <= listed | {"stream_options"}
