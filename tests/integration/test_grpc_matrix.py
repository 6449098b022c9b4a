"""Each field of Generate over gRPC, drafted and not: the same tokens, and a field with effect."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from flashduet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support.pair import Pair
from tests.support.tiny import IM_END, MASK

LENGTH = 16
PLAIN = {"temperature": 4, "seed": "7"}
# Mostly between four tokens, so that an answer repeats itself.
FEW = PLAIN | {"logitBias": {str(token): 30 for token in (70, 71, 72, 73)}}
DRAFTING = {"off": {"mode": 3}, "on": {"mode": 2, "blockLength": 8}}

# A field's name, and what is asked with it and without it; the same answer where both are equal
# in `SAME`. Sampling fields have a point before their name.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({"model": "target"}, {}),
    "text": ({"text": "hello"}, {}),
    "chat": ({"chat": {"messages": [{"role": "user", "content": "hello"}]}}, {}),
    "chat.template_kwargs": (
        {
            "chat": {
                "messages": [{"role": "user", "content": "hello"}],
                "templateKwargs": {"mood": "merry"},
            }
        },
        {"chat": {"messages": [{"role": "user", "content": "hello"}]}},
    ),
    "token_ids": ({"tokenIds": {"ids": [75, 72, 80]}}, {}),
    "max_tokens": ({"maxTokens": 5}, {}),
    "stop": ({"stop": ["d"], "sampling": FEW}, {"sampling": FEW}),
    "stop_token_ids": ({"stopTokenIds": [71], "sampling": FEW}, {"sampling": FEW}),
    "ignore_eos": (
        {"sampling": PLAIN | {"logitBias": {str(IM_END): 100}}},
        {"sampling": PLAIN | {"logitBias": {str(IM_END): 100}}, "ignoreEos": False},
    ),
    "request_id": ({"requestId": "mine"}, {}),
    "include_special_tokens": (
        {"includeSpecialTokens": True, "sampling": PLAIN | {"logitBias": {str(MASK): 100}}},
        {"sampling": PLAIN | {"logitBias": {str(MASK): 100}}},
    ),
    "n": ({"n": 3}, {}),
    "top_logprobs": ({"topLogprobs": 3, "n": 2}, {"n": 2}),
    "priority": ({"priority": "PRIORITY_BATCH"}, {}),
    "cache_salt": ({"cacheSalt": "mine"}, {}),
    "echo": ({"echo": True}, {}),
    ".temperature": ({"sampling": PLAIN | {"temperature": 0}}, {}),
    ".seed": ({"sampling": PLAIN | {"seed": "18446744073709551615"}}, {}),
    ".top_p": ({"sampling": PLAIN | {"topP": 0.05}}, {}),
    ".top_k": ({"sampling": PLAIN | {"topK": 1}}, {}),
    ".min_p": ({"sampling": PLAIN | {"minP": 0.9}}, {}),
    ".logit_bias": ({"sampling": FEW}, {}),
    ".presence_penalty": ({"sampling": FEW | {"presencePenalty": 2}}, {"sampling": FEW}),
    ".frequency_penalty": ({"sampling": FEW | {"frequencyPenalty": 2}}, {"sampling": FEW}),
    ".repetition_penalty": ({"sampling": FEW | {"repetitionPenalty": 5}}, {"sampling": FEW}),
}
SAME = {"model", "request_id", "priority", "cache_salt", "top_logprobs"}
# In every request of the matrix, or the message that the cases above are about.
ALWAYS = {"speculation", "sampling"}


@dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finished: gateway_pb2.GenerateFinished | None = None


@dataclass
class Answer:
    """All that one call gave."""

    started: gateway_pb2.GenerateStarted
    choices: list[Choice]
    complete: gateway_pb2.GenerateComplete

    @property
    def told(self) -> list[tuple[str, list[int], int]]:
        return [
            (choice.text, choice.token_ids, choice.finished.finish_reason)
            for choice in self.choices
        ]


def ask(pair: Pair, fields: dict[str, Any], drafting: str) -> Answer:
    body = {"maxTokens": LENGTH, "ignoreEos": True, "sampling": PLAIN} | fields
    if not body.keys() & {"text", "chat", "tokenIds"}:
        body["tokenIds"] = {"ids": [5, 9, 77, 140, 33]}
    body["speculation"] = DRAFTING[drafting]
    started, complete, choices = None, None, defaultdict(Choice)
    with grpc.insecure_channel(pair.gateway) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for response in stub.Generate(ParseDict(body, gateway_pb2.GenerateRequest()), timeout=240):
            assert complete is None, "a message after Complete"
            match response.WhichOneof("message"):
                case "started":
                    assert started is None
                    started = response.started
                case "chunk":
                    made = choices[response.chunk.choice]
                    assert made.finished is None, "a chunk of an answer that is over"
                    made.text += response.chunk.text
                    made.token_ids += response.chunk.token_ids
                    made.logprobs += response.chunk.logprobs
                case "finished":
                    made = choices[response.finished.choice]
                    assert made.finished is None
                    made.finished = response.finished
                case "complete":
                    complete = response.complete
    return Answer(started, [choices[index] for index in range(len(choices))], complete)


@pytest.mark.parametrize("name", CASES)
def test_a_field_gives_the_same_tokens_drafted_and_not(pair: Pair, name):
    given, around = CASES[name]
    plain, drafted, without = (
        ask(pair, given, "off"),
        ask(pair, given, "on"),
        ask(pair, around, "off"),
    )
    assert drafted.told == plain.told
    assert (plain.told == without.told) == (name in SAME)
    for answer in (plain, drafted):
        assert len(answer.choices) == given.get("n", 1)
        tokens = [len(choice.token_ids) for choice in answer.choices]
        assert [choice.finished.completion_tokens for choice in answer.choices] == tokens
        assert answer.complete.usage.completion_tokens == sum(tokens)
        assert answer.complete.finish_reason == answer.choices[0].finished.finish_reason
    assert plain.complete.speculation.drafted_tokens == 0
    if len(drafted.choices[0].token_ids) > 4:
        assert drafted.complete.speculation.drafted_tokens > 0
        assert drafted.complete.speculation.acceptance_length >= 1


def test_each_field_is_in_the_matrix():
    names = {name.partition(".")[0] for name in CASES if not name.startswith(".")}
    assert {one.name for one in gateway_pb2.GenerateRequest.DESCRIPTOR.fields} == names | ALWAYS
    sampling = {name[1:] for name in CASES if name.startswith(".")}
    assert {one.name for one in common_pb2.SamplingParams.DESCRIPTOR.fields} == sampling


def test_logprobs_come_with_their_tokens(pair: Pair):
    for drafting in DRAFTING:
        fields = {"topLogprobs": 3, "n": 2, "includeSpecialTokens": True}
        answer = ask(pair, fields, drafting)
        for choice in answer.choices:
            assert [one.chosen.token_id for one in choice.logprobs] == choice.token_ids
            for position in choice.logprobs:
                best = [top.logprob for top in position.top]
                assert len(best) == 3
                assert best == sorted(best, reverse=True)
                assert position.chosen.logprob <= best[0] <= 0
            shown = b"".join(one.chosen.token_bytes for one in choice.logprobs)
            assert shown.decode(errors="replace") == choice.text
    assert not ask(pair, {}, "on").choices[0].logprobs


def test_a_stop_says_what_it_was(pair: Pair):
    for drafting in DRAFTING:
        by_text = ask(pair, {"stop": ["never", "d"], "sampling": FEW, "n": 2}, drafting)
        for choice in by_text.choices:
            assert choice.finished.stop_string == "d"
            assert "d" not in choice.text
        assert by_text.complete.stop_string == "d"
        by_id = ask(pair, {"stopTokenIds": [71], "sampling": FEW}, drafting)
        assert by_id.choices[0].finished.stop_token_id == by_id.complete.stop_token_id == 71
