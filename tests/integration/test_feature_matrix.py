"""Each field of a request, with drafting and without, whole and streamed: the same answer in the
right shape, and a field that does what it says."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tests.support.openai_shapes import (
    Seen,
    streamed_chat,
    streamed_completion,
    whole_chat,
    whole_completion,
)
from tests.support.pair import Pair
from tests.support.tiny import IM_END, MASK

LENGTH = 16
DRAFTING = {"off": {"mode": "off"}, "on": {"mode": "fixed", "block_length": 8}}
PROMPT = "hello there"
PLAIN = {"temperature": 4, "seed": 7, "ignore_eos": True}
# Mostly between the tokens of "c" to "f", so that an answer repeats itself: work for penalties.
FEW = PLAIN | {"logit_bias": {str(token): 30 for token in (70, 71, 72, 73)}}


@dataclass(frozen=True)
class Case:
    """A field with a value, and what else the request holds.

    `changes`: the answer is another one than without the field. `also` looks at the answers with
    and without it.
    """

    given: dict[str, Any]
    around: dict[str, Any] = field(default_factory=lambda: PLAIN)
    changes: bool = True
    also: Callable[[Seen, Seen], None] = lambda seen, without: None


def ends_with(reason: str, tokens: int) -> Callable[[Seen, Seen], None]:
    def check(seen: Seen, without: Seen) -> None:
        assert [choice.finish_reason for choice in seen.choices] == [reason]
        assert seen.usage["completion_tokens"] == tokens

    return check


def is_cut_short(seen: Seen, without: Seen) -> None:
    assert without.texts[0].startswith(seen.texts[0])
    assert seen.choices[0].finish_reason == "stop"
    assert without.choices[0].finish_reason == "length"


def has_choices(count: int) -> Callable[[Seen, Seen], None]:
    def check(seen: Seen, without: Seen) -> None:
        assert len(set(seen.texts)) == count
        assert seen.texts[0] == without.texts[0]
        assert seen.usage["completion_tokens"] == count * LENGTH

    return check


def tells_logprobs(top: int) -> Callable[[Seen, Seen], None]:
    def check(seen: Seen, without: Seen) -> None:
        for choice in seen.choices:
            assert len(choice.tokens) == len(choice.logprobs) == len(choice.tops) == LENGTH
            assert all(logprob <= 0 for logprob in choice.logprobs)
            # The chosen token need not be among the likeliest, and completions add it to them.
            assert all(top <= len(found) <= top + 1 for found in choice.tops)
        assert not without.choices[0].tokens

    return check


def tells_meta_info(seen: Seen, without: Seen) -> None:
    assert without.meta_info is None
    assert seen.meta_info["spec_verify_ct"] == seen.stats["rounds"]
    assert seen.meta_info["spec_accept_length"] == seen.stats["acceptance_length"]
    assert seen.meta_info["completion_tokens"] == LENGTH


def shows_special_tokens(seen: Seen, without: Seen) -> None:
    assert seen.texts == ["<|mask|>" * LENGTH]
    assert without.texts == [""]


def has_a_longer_prompt(seen: Seen, without: Seen) -> None:
    assert seen.usage["prompt_tokens"] > without.usage["prompt_tokens"]


def begins_with_the_prompt(seen: Seen, without: Seen) -> None:
    assert seen.texts == [PROMPT + without.texts[0]]


def answers_each(count: int) -> Callable[[Seen, Seen], None]:
    def check(seen: Seen, without: Seen) -> None:
        assert len(seen.choices) == count
        assert seen.texts[0] == without.texts[0]

    return check


COMMON = {
    "max_tokens": Case({"max_tokens": 5}, also=ends_with("length", 5)),
    "n": Case({"n": 3}, also=has_choices(3)),
    "temperature": Case({"temperature": 0}),
    "seed": Case({"seed": 8}),
    "top_p": Case({"top_p": 0.05}),
    "top_k": Case({"top_k": 1}),
    "min_p": Case({"min_p": 0.9}),
    "stop": Case({"stop": ["never", "d"]}, FEW, also=is_cut_short),
    "stop_token_ids": Case({"stop_token_ids": [71]}, FEW, also=is_cut_short),
    "ignore_eos": Case(
        {"ignore_eos": False},
        PLAIN | {"logit_bias": {str(IM_END): 100}},
        changes=False,
        also=ends_with("stop", 1),
    ),
    "logit_bias": Case({"logit_bias": {"70": 100, "71": 100}}),
    "presence_penalty": Case({"presence_penalty": 2}, FEW),
    "frequency_penalty": Case({"frequency_penalty": 2}, FEW),
    "repetition_penalty": Case({"repetition_penalty": 5}, FEW),
    "skip_special_tokens": Case(
        {"skip_special_tokens": False},
        PLAIN | {"logit_bias": {str(MASK): 100}},
        also=shows_special_tokens,
    ),
    "cache_salt": Case({"cache_salt": "mine"}, changes=False),
    "priority": Case({"priority": "batch"}, changes=False),
    "service_tier": Case({"service_tier": "flex"}, changes=False),
    "return_meta_info": Case({"return_meta_info": True}, changes=False, also=tells_meta_info),
}
CHAT = COMMON | {
    "max_completion_tokens": Case({"max_completion_tokens": 5}, also=ends_with("length", 5)),
    "logprobs": Case({"logprobs": True}, changes=False, also=tells_logprobs(0)),
    "top_logprobs": Case(
        {"logprobs": True, "top_logprobs": 3, "n": 2},
        PLAIN | {"n": 2},
        changes=False,
        also=tells_logprobs(3),
    ),
    "chat_template_kwargs": Case(
        {"chat_template_kwargs": {"mood": "merry"}}, also=has_a_longer_prompt
    ),
}
COMPLETIONS = COMMON | {
    "logprobs": Case({"logprobs": 3}, changes=False, also=tells_logprobs(3)),
    "echo": Case({"echo": True}, also=begins_with_the_prompt),
    "prompt, a list": Case({"prompt": [PROMPT, "go on"]}, also=answers_each(2)),
    "prompt, ids": Case({"prompt": [75, 72, 80]}),
    "prompt, lists of ids": Case({"prompt": [[75, 72], [80, 81]], "n": 2}),
}
# What the matrix is about by itself: each is in every request of it.
ALWAYS = {"model", "messages", "prompt", "stream", "stream_options", "speculation"}


class Api:
    """One route, asked through the SDK."""

    def __init__(self, client: openai.OpenAI, route: str) -> None:
        self.cases = CHAT if route == "chat" else COMPLETIONS
        self._completions = client.chat.completions if route == "chat" else client.completions
        self._known = inspect.signature(self._completions.create).parameters
        self._plain: dict[str, Seen] = {}
        self._readers = (
            (whole_chat, streamed_chat)
            if route == "chat"
            else (whole_completion, streamed_completion)
        )
        self._always = {"model": client.models.list().data[0].id} | (
            {"messages": [{"role": "user", "content": PROMPT}]}
            if route == "chat"
            else {"prompt": PROMPT}
        )

    def plain(self, around: dict[str, Any]) -> Seen:
        """What is asked without a case's field; many cases have it in common."""
        key = str(around)
        if key not in self._plain:
            self._plain[key] = self.ask(around, "off")
        return self._plain[key]

    def ask(self, fields: dict[str, Any], drafting: str = "on", *, stream: bool = False) -> Seen:
        request = self._always | fields | {"speculation": DRAFTING[drafting]}
        if "max_completion_tokens" not in request:
            request = {"max_tokens": LENGTH} | request
        # What the SDK has no name for it sends as it is.
        named = {name: value for name, value in request.items() if name in self._known}
        named["extra_body"] = {name: request[name] for name in request.keys() - named.keys()}
        whole, streamed = self._readers
        if not stream:
            return whole(self._completions.with_raw_response.create(**named).http_response.json())
        pieces = self._completions.create(
            **named, stream=True, stream_options={"include_usage": True}
        )
        return streamed([piece.to_dict() for piece in pieces])


@pytest.fixture(scope="module")
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.http}/v1", api_key="x", timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def apis(client: openai.OpenAI) -> dict[str, Api]:
    return {route: Api(client, route) for route in ("chat", "completions")}


ALL = [("chat", name) for name in CHAT] + [("completions", name) for name in COMPLETIONS]


@pytest.mark.parametrize(("route", "name"), ALL, ids=["-".join(one) for one in ALL])
def test_a_field_gives_the_same_answer_drafted_and_not_whole_and_streamed(apis, route, name):
    api, case = apis[route], apis[route].cases[name]
    without = api.plain(case.around)
    asked = {**case.around, **case.given}
    seen = {
        (drafting, stream): api.ask(asked, drafting, stream=stream)
        for drafting in DRAFTING
        for stream in (False, True)
    }
    first = seen["off", False]
    assert (first.texts != without.texts) == case.changes
    for (drafting, _), one in seen.items():
        assert_same(one, first)
        case.also(one, without)
        if drafting == "off":
            assert one.stats["drafted_tokens"] == 0
        elif one.usage["completion_tokens"] > 4 * len(one.choices):
            assert one.stats["drafted_tokens"] > 0, one.stats["undrafted_rounds"]


def assert_same(one: Seen, other: Seen) -> None:
    """Equal in all that is told of tokens; logprobs but for the rounding of another batch."""
    assert one.texts == other.texts
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [one.usage[name] for name in counts] == [other.usage[name] for name in counts]
    for mine, theirs in zip(one.choices, other.choices, strict=True):
        assert mine.finish_reason == theirs.finish_reason
        assert mine.tokens == theirs.tokens
        assert mine.offsets == theirs.offsets
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        for top, expected in zip(mine.tops, theirs.tops, strict=True):
            assert top == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def documented(pair: Pair) -> dict[str, dict[str, Any]]:
    """Fields of each route with what our OpenAPI document says of them."""
    found = httpx.get(f"{pair.http}/openapi.json", timeout=60).json()["components"]["schemas"]
    return {
        "chat": found["ChatCompletionRequest"]["properties"],
        "completions": found["CompletionRequest"]["properties"],
    }


def described(fields: dict[str, Any], words: str) -> set[str]:
    return {name for name, one in fields.items() if one.get("description", "").startswith(words)}


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_every_documented_field_is_in_the_matrix_or_harmless_or_refused(apis, documented, route):
    fields, api = documented[route], apis[route]
    ignored = described(fields, "Accepted and ignored")
    refused = described(fields, "Not supported")
    in_matrix = {name.partition(",")[0] for name in api.cases}
    assert fields.keys() - ignored - refused - in_matrix <= ALWAYS
    plain = api.ask(PLAIN)
    assert api.ask(PLAIN | {name: {"any": ["thing", 1]} for name in ignored}).texts == plain.texts
    assert api.ask(PLAIN | dict.fromkeys(refused)).texts == plain.texts
    for name in [*refused, "unheard_of"]:
        with pytest.raises(openai.BadRequestError) as error:
            api.ask(PLAIN | {name: ["a", "value"]})
        assert error.value.param.startswith(name)
        assert error.value.type == "invalid_request_error"
