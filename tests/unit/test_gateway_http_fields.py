"""Which fields are refused, by name, and which are not."""

from __future__ import annotations

import json

import openai
import pytest

from gateway.http.chat_request import ChatCompletionRequest
from gateway.http.completion_request import CompletionRequest
from gateway.http.fields import HARMLESS
from gateway.http.fields import REFUSED as REFUSED_FIELD
from tests.unit.http_support import CHAT, COMPLETIONS, HELLO, Http

pytest_plugins = ["tests.unit.gateway_fixtures"]

REFUSED = [
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"verbosity": "low"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"guided_json": {}}, "guided_json"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": 10**12}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "body"),
    ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
    ({"speculation": {"mode": "wild"}}, "speculation.mode"),
    ({"speculation": {"block_length": 33}}, "speculation.block_length"),
    ({"speculation": {"drafter_only": "yes"}}, "speculation.drafter_only"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
]


async def test_what_would_change_the_output_is_refused_by_name(http: Http) -> None:
    for fields, param in REFUSED:
        response = await http.raw.post(
            "/v1/chat/completions",
            content=json.dumps({"model": "toy", "messages": HELLO, **fields}),
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error", fields
        assert error["param"].startswith(param), (fields, error)
        assert error["message"].startswith(error["param"]), (fields, error)
        assert error["code"] in ("invalid_value", "context_length_exceeded"), fields
    assert not http.stack.target.openings


UNUSED = {
    "best_of": 1,
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "auto",
    "response_format": {"type": "text"},
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "modalities": ["text"],
    "verbosity": "medium",
    "echo": False,
}


async def test_what_cannot_change_the_output_is_accepted(http: Http) -> None:
    fields = ChatCompletionRequest.model_fields
    harmless = {name for name, field in fields.items() if field.description == HARMLESS}
    assert {"user", "metadata", "store", "safety_identifier", "prediction"} <= harmless
    plain = (await http.post(temperature=0)).json()["choices"]
    for values in (
        dict.fromkeys(harmless, "x"),
        {name: {"a": ["b"]} for name in harmless},
        {"service_tier": "default"},
        UNUSED,
        dict.fromkeys(fields.keys() - {"model", "messages", "max_tokens", "temperature"}),
        {"a_field_of_another_server": None},
    ):
        response = await http.post(temperature=0, **values)
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == plain


async def test_every_refused_field_is_documented_as_such_and_refused(http: Http) -> None:
    for model, path in ((ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETIONS)):
        common = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
        refused = {n for n, f in model.model_fields.items() if f.description == REFUSED_FIELD}
        assert refused
        for name in refused:
            error = (await http.send(path, {**common, name: {"odd": [1]}})).json()["error"]
            assert error["param"] == name
            assert "is not supported; leave it out" in error["message"]


async def test_an_unknown_model_is_404(http: Http) -> None:
    for path, field in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}),
                        ("/tokenize", {"prompt": "a", "max_tokens": None})):  # fmt: skip
        response = await http.send(path, {"model": "gpt-4", **field})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        await http.chat(model="gpt-4")


async def test_what_does_not_fit_the_context_has_openai_s_code(http: Http) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    for fields in ({"messages": long}, {"max_tokens": 500}):
        response = await http.post(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    response = await http.post_completion(prompt=[[5], [6] * 513])
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"].startswith("prompt")
