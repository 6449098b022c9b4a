"""Every row of the bad-input table: the field, its value and its limit are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashduet.errors import InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.common_pb2 import PRIORITY_BATCH
from gateway.admission import Limits, admit
from gateway.request import Priority, Speculation, SpeculationMode
from gateway.router import ServedModel
from gateway.tokenization import Tokenizer
from tests.support.tiny import IM_END
from tests.unit.toy_model import tokenizer_folder

pytest_plugins = ["tests.unit.gateway_fixtures"]

SERVED = ServedModel(
    name="toy",
    vocab_size=320,
    context_window=64,
    max_block_length=32,
    drafter="toy-drafter",
    block_length=8,
    created=1,
    max_top_logprobs=5,
)
LIMITS = Limits(
    max_tokens=None,
    default_max_tokens=None,
    speculation=Speculation(SpeculationMode.AUTO, None),
    most_choices=4,
)


def request(**fields: object) -> pb.GenerateRequest:
    if not {"chat", "token_ids"} & fields.keys():
        fields.setdefault("text", "hello")
    return pb.GenerateRequest(**fields)  # type: ignore[arg-type]


def chat(*turns: tuple[str, str], **variables: object) -> pb.ChatMessages:
    messages = [pb.ChatMessage(role=r, content=c) for r, c in turns]
    chat = pb.ChatMessages(messages=messages)
    chat.template_kwargs.update(variables)
    return chat


BAD = [
    (request(text="x" * 64), "text", "64 tokens", "context window of 64"),
    (request(text="x" * 100_000), "text", "100000 characters", "context window of 64"),
    (request(token_ids=pb.TokenIds(ids=[5] * 64)), "token_ids", "64 tokens", "window of 64"),
    (request(chat=chat(("user", "x" * 60))), "messages", "tokens", "context window of 64"),
    (request(token_ids=pb.TokenIds(ids=[5] * 65)), "token_ids", "65 tokens", "at most 64"),
    (request(chat=chat(*[("user", "")] * 65)), "messages", "65 messages", "at most 64"),
    (request(text=""), "text", "no tokens", "at least one token"),
    (request(token_ids=pb.TokenIds()), "token_ids", "no tokens", "at least one token"),
    (request(max_tokens=65), "max_tokens", "65", "from 1 to 64"),
    (request(max_tokens=0), "max_tokens", "0", "from 1 to 64"),
    (request(max_tokens=62), "max_tokens", "62", "leaves"),
    (request(sampling={"temperature": -0.5}), "sampling.temperature", "-0.5", "from 0"),
    (request(sampling={"temperature": float("nan")}), "sampling.temperature", "nan", "finite"),
    (request(sampling={"temperature": float("inf")}), "sampling.temperature", "inf", "finite"),
    (request(sampling={"top_p": 0.0}), "sampling.top_p", "0.0", "above 0"),
    (request(sampling={"top_p": 1.5}), "sampling.top_p", "1.5", "at most 1"),
    (request(sampling={"min_p": -0.1}), "sampling.min_p", "-0.1", "from 0 to 1"),
    (request(model="gpt-4"), "model", "gpt-4", "toy"),
    (request(chat=pb.ChatMessages()), "messages", "[]", "at least one"),
    (request(chat=chat(("robot", "x"))), "messages[0].role", "robot", "system, user, assistant"),
    (request(chat=chat(("user", "x"), ("", "x"))), "messages[1].role", "''", "one of"),
    (request(token_ids=pb.TokenIds(ids=[1, 320])), "token_ids", "320", "below 320"),
    (request(stop=["x"] * 65), "stop", "65 strings", "at most 64"),
    (request(stop=["ok", ""]), "stop", "''", "1 to 1024"),
    (request(stop=["x" * 1025]), "stop", "xxx", "1 to 1024"),
    (request(stop_token_ids=[320]), "stop_token_ids", "320", "below 320"),
    (request(stop_token_ids=[1] * 1025), "stop_token_ids", "1025 ids", "at most 1024"),
    (request(request_id=""), "request_id", "''", "1 to 128"),
    (request(request_id="a\nb"), "request_id", "a\\nb", "printable"),
    (request(request_id="é"), "request_id", "é", "ASCII"),
    (request(request_id="x" * 129), "request_id", "xxx", "1 to 128"),
    (request(speculation={"block_length": 33}), "speculation.block_length", "33", "to 32"),
    (request(speculation={"block_length": 0}), "speculation.block_length", "0", "from 1"),
    (request(speculation={"mode": 9}), "speculation.mode", "9", "AUTO, FIXED or OFF"),
    (request(n=0), "n", "0", "from 1 to 4"),
    (request(n=5), "n", "5", "from 1 to 4"),
    (request(top_logprobs=6), "top_logprobs", "6", "from 0 to 5"),
    (request(priority=7), "priority", "7", "INTERACTIVE or BATCH"),
    (request(cache_salt="x" * 257), "cache_salt", "xxx", "at most 256"),
    (request(sampling={"logit_bias": {320: 1.0}}), "sampling.logit_bias", "320", "320"),
    (request(sampling={"presence_penalty": 2.5}), "sampling.presence_penalty", "2.5", "2"),
    (request(sampling={"repetition_penalty": 0.0}), "sampling.repetition_penalty", "0", "above 0"),
    (
        request(chat=chat(("user", "x"), chat_template="{{ 1 }}")),
        "template_kwargs.chat_template",
        "a value",
        "not a variable",
    ),
    (
        request(chat=chat(("user", "x"), tools=[])),
        "template_kwargs.tools",
        "a value",
        "not a variable",
    ),
    (pb.GenerateRequest(max_tokens=3), "prompt", "nothing", "text, chat and token_ids"),
]


@pytest.mark.parametrize(("message", "field", "value", "limit"), BAD, ids=lambda v: str(v)[:24])
async def test_bad_input_is_refused_with_field_value_and_limit(
    tokenizer: Tokenizer, message: pb.GenerateRequest, field: str, value: str, limit: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await admit(message, SERVED, tokenizer, LIMITS)
    assert caught.value.field == field
    assert value in caught.value.message
    assert limit in caught.value.message
    assert len(caught.value.message) < 300, "a huge value is not echoed whole"


async def test_the_gateways_own_limits_come_on_top(tokenizer: Tokenizer) -> None:
    limits = Limits(max_tokens=20, default_max_tokens=8, speculation=LIMITS.speculation)
    assert (await admit(request(), SERVED, tokenizer, limits)).max_tokens == 8
    assert (await admit(request(max_tokens=20), SERVED, tokenizer, limits)).max_tokens == 20
    with pytest.raises(InvalidRequest, match="from 1 to 20"):
        await admit(request(max_tokens=21), SERVED, tokenizer, limits)


async def test_what_is_absent_gets_its_default(tokenizer: Tokenizer) -> None:
    admitted = await admit(request(text="hello"), SERVED, tokenizer, LIMITS)
    assert admitted.sampling.greedy
    assert admitted.max_tokens == 64 - len(admitted.prompt_ids)
    assert admitted.stop_ids == {IM_END}
    assert admitted.request_id.startswith("req-")
    assert admitted.speculation == LIMITS.speculation
    again = await admit(request(text="hello"), SERVED, tokenizer, LIMITS)
    assert again.request_id != admitted.request_id
    assert again.sampling.seed != admitted.sampling.seed, "each request draws its own seed"


async def test_what_is_given_is_kept(tokenizer: Tokenizer) -> None:
    message = request(
        request_id="mine",
        sampling={"temperature": 0.7, "seed": 2**64 - 1},
        stop=["a", "b", "a"],
        stop_token_ids=[9],
        ignore_eos=True,
        speculation={"mode": pb.SPECULATION_MODE_FIXED, "block_length": 4, "drafter_only": True},
    )
    message.n, message.top_logprobs, message.cache_salt = 3, 5, "tenant"
    message.priority = PRIORITY_BATCH
    admitted = await admit(message, SERVED, tokenizer, LIMITS)
    assert admitted.request_id == "mine"
    assert (admitted.choices, admitted.top_logprobs, admitted.cache_salt) == (3, 5, "tenant")
    assert admitted.priority is Priority.BATCH
    assert admitted.sampling.seed == 2**64 - 1
    assert admitted.stops == ("a", "b")
    assert admitted.stop_ids == {9}
    assert admitted.speculation == Speculation(SpeculationMode.FIXED, 4, drafter_only=True)


async def test_a_chat_template_gets_its_variables_with_whole_numbers(
    tmp_path: Path,
) -> None:
    folder = tokenizer_folder(tmp_path)
    template = "{{ messages[0].content }}|{{ think }}|{{ depth }}|{{ share }}|{{ names[0].n + 1 }}"
    (folder / "chat_template.jinja").write_text(template)
    variables = {"think": False, "depth": 2, "share": 0.5, "names": [{"n": 41}]}
    message = request(chat=chat(("user", "hi"), **variables), echo=True)
    admitted = await admit(message, SERVED, Tokenizer(folder), LIMITS)
    assert admitted.echo == "hi|False|2|0.5|42"


async def test_without_logprobs_at_the_target_they_are_refused(tokenizer: Tokenizer) -> None:
    served = replace(SERVED, max_top_logprobs=0)
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        await admit(request(top_logprobs=0), served, tokenizer, LIMITS)
    assert (await admit(request(), served, tokenizer, LIMITS)).top_logprobs is None
