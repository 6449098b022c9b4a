"""Every row of the bad-input table: the field, its value and its limit are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashduet.errors import InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from gateway.admission import Limits, admit
from gateway.request import Speculation, SpeculationMode
from gateway.router import ServedModel
from gateway.tokenization import Tokenizer
from tests.support.tiny import IM_END
from tests.unit.gateway_support import tokenizer_folder

SERVED = ServedModel(
    name="toy",
    vocab_size=320,
    context_window=64,
    max_block_length=32,
    drafter="toy-drafter",
    block_length=8,
    created=1,
)
LIMITS = Limits(
    max_tokens=None,
    default_max_tokens=None,
    speculation=Speculation(SpeculationMode.AUTO, None),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_folder(Path(tmp_path_factory.mktemp("tokenizer"))))


def request(**fields: object) -> pb.GenerateRequest:
    if not {"chat", "token_ids"} & fields.keys():
        fields.setdefault("text", "hello")
    return pb.GenerateRequest(**fields)  # type: ignore[arg-type]


def chat(*turns: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns])


BAD = [
    (request(text="x" * 64), "text", "64 tokens", "context window of 64"),
    (request(text="x" * 100_000), "text", "100000 characters", "context window of 64"),
    (request(token_ids=pb.TokenIds(ids=[5] * 64)), "token_ids", "64 tokens", "window of 64"),
    (request(chat=chat(("user", "x" * 60))), "messages", "tokens", "context window of 64"),
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
        speculation={"mode": pb.SPECULATION_MODE_FIXED, "block_length": 4},
    )
    admitted = await admit(message, SERVED, tokenizer, LIMITS)
    assert admitted.request_id == "mine"
    assert admitted.sampling.seed == 2**64 - 1
    assert admitted.stops == ("a", "b")
    assert admitted.stop_ids == {9}
    assert admitted.speculation == Speculation(SpeculationMode.FIXED, 4)
