"""Requests at the edges of what is allowed, over the real stack: right, or refused by name."""

import threading
from dataclasses import replace

import grpc
import pytest

from flashduet.client import Client, Message
from flashduet.errors import InvalidRequest, RemoteInvalidRequest
from flashduet.rpc import from_rpc_error
from flashduet.sampling.params import Sampling
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.pair import WAIT_S, Pair
from tests.support.tiny import EOS, IM_END, IM_START, MASK, VOCAB_SIZE

WINDOW = 512
HOT = Sampling(temperature=4.0, seed=3)
PROMPT = [5, 9, 77, 140, 33]


def generate(pair: Pair, prompt=None, **options):
    options = {"max_tokens": 24, "sampling": HOT, "ignore_eos": True, "timeout": 240} | options
    with Client(pair.gateway) as client:
        return client.generate(PROMPT if prompt is None else prompt, **options).result()


def both(pair: Pair, prompt=None, **options):
    """The answer drafted; it must be the undrafted one in every respect."""
    plain = generate(pair, prompt, speculation="off", **options)
    drafted = generate(pair, prompt, speculation="fixed", block_length=8, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason
    # How much of a prompt is found again depends on what the draft still holds of it.
    assert replace(drafted.usage, cached_tokens=0) == replace(plain.usage, cached_tokens=0)
    assert (drafted.stop_string, drafted.stop_token_id) == (plain.stop_string, plain.stop_token_id)
    return drafted


@pytest.mark.parametrize("left", [1, 2, 3, 7, 8, 9])
def test_prompts_that_leave_just_so_much_of_the_context_window(pair, left):
    prompt = [5 + index % 200 for index in range(WINDOW - left)]
    run = both(pair, prompt, max_tokens=None)
    assert len(run.token_ids) == left
    assert run.finish_reason == "length"
    assert both(pair, prompt, max_tokens=left).token_ids == run.token_ids
    with pytest.raises(RemoteInvalidRequest) as refused:
        generate(pair, prompt, max_tokens=left + 1)
    assert refused.value.field == "max_tokens"


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 5000])
def test_a_prompt_that_leaves_nothing_of_the_context_window_is_refused(pair, length):
    with pytest.raises(RemoteInvalidRequest) as refused:
        generate(pair, [5] * length, max_tokens=1)
    assert refused.value.field == "token_ids"
    assert str(WINDOW) in refused.value.message


def test_the_first_and_the_last_token_id_are_tokens_like_others(pair):
    for prompt in ([0], [VOCAB_SIZE - 1], [0, VOCAB_SIZE - 1, MASK, IM_END], [MASK] * 40):
        assert len(both(pair, prompt).token_ids) == 24
    # An answer may hold them too, and may stop at them.
    for token in (0, VOCAB_SIZE - 1):
        for seed in range(400):
            sampling = Sampling(temperature=100.0, seed=seed)
            run = generate(pair, sampling=sampling, speculation="off")
            if token in run.token_ids[1:-1]:
                break
        else:
            raise AssertionError(f"no seed gave token {token}")
        assert both(pair, sampling=sampling).token_ids == run.token_ids
        cut = both(pair, sampling=sampling, stop_token_ids=[token])
        assert cut.token_ids == run.token_ids[: run.token_ids.index(token) + 1]
        assert cut.stop_token_id == token
    with pytest.raises(InvalidRequest):
        generate(pair, [VOCAB_SIZE])


def test_a_stop_string_that_is_the_whole_answer(pair):
    whole = generate(pair, speculation="off")
    assert "\ufffd" not in whole.text[-1]
    run = both(pair, stop=[whole.text])
    assert run.text == ""
    assert run.finish_reason == "stop"
    assert run.stop_string == whole.text


def test_a_stop_at_the_first_token(pair):
    whole = generate(pair, speculation="off")
    run = both(pair, stop_token_ids=[whole.token_ids[0]])
    assert run.token_ids == whole.token_ids[:1]
    assert run.text == ""
    assert run.speculation.rounds == 0
    run = both(pair, stop=[whole.text[0]])
    assert run.text == ""
    assert run.finish_reason == "stop"


def test_one_token_is_an_answer(pair):
    run = both(pair, max_tokens=1)
    assert len(run.token_ids) == 1
    assert run.speculation.rounds == 0
    assert run.speculation.acceptance_length == 0


def test_long_lists_of_stops(pair):
    whole = generate(pair, speculation="off")
    stops = [f"never{n}" + "x" * 1000 for n in range(63)]
    assert both(pair, stop=stops).token_ids == whole.token_ids
    assert (
        both(pair, stop=[*stops, whole.text[3]]).text
        == whole.text[: whole.text.index(whole.text[3])]
    )
    every = list(range(VOCAB_SIZE))
    assert both(pair, stop_token_ids=every).token_ids == whole.token_ids[:1]
    for field, value in (
        ("stop", [*stops, "a", "b"]),
        ("stop", [""]),
        ("stop", ["x" * 1025]),
        ("stop_token_ids", [5] * 1025),
        ("stop_token_ids", [VOCAB_SIZE]),
    ):
        with pytest.raises(RemoteInvalidRequest) as refused:
            generate(pair, **{field: value})
        assert refused.value.field == field
        assert len(refused.value.message) < 300


def test_texts_without_tokens_and_texts_of_special_tokens(pair):
    for prompt, field in (("", "text"), ([], "token_ids")):
        with pytest.raises(RemoteInvalidRequest) as refused:
            generate(pair, prompt, raw=True) if prompt == "" else _tokens(pair, [])
        assert refused.value.field == field
    run = both(pair, "<|im_start|><|im_end|><|mask|><|endoftext|>", raw=True)
    assert run.usage.prompt_tokens == 4
    assert run.token_ids == generate(pair, [IM_START, IM_END, MASK, EOS]).token_ids
    assert both(pair, [Message("user", "")]).token_ids
    assert both(pair, [Message("user", "<|mask|>"), Message("assistant", "")]).token_ids


def _tokens(pair: Pair, ids: list[int]) -> None:
    request = gateway_pb2.GenerateRequest()
    request.token_ids.SetInParent()
    request.token_ids.ids.extend(ids)
    with grpc.insecure_channel(pair.gateway) as channel:
        try:
            list(gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, timeout=60))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def test_the_same_request_id_twice_at_once_is_two_requests(pair):
    runs = []

    def run() -> None:
        runs.append(generate(pair, request_id="mine", max_tokens=100))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [one.request_id for one in runs] == ["mine", "mine"]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].usage.completion_tokens == 100
    pair.assert_nothing_left()


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seeds_at_the_ends_of_their_range(pair, seed):
    run = both(pair, sampling=Sampling(temperature=4.0, seed=seed))
    assert run.seed == seed


def test_readers_that_stop_reading_hold_up_nobody(pair):
    import psutil

    alone = generate(pair)
    gateway = psutil.Process(pair.pid("gateway"))
    request = gateway_pb2.GenerateRequest(max_tokens=500, ignore_eos=True)
    request.token_ids.ids.extend(PROMPT)
    request.include_special_tokens = True
    before = gateway.memory_info().rss
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(pair.gateway, options=options) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        calls = [stub.Generate(request, timeout=600) for _ in range(8)]
        first = [next(call) for call in calls]
        assert all(message.HasField("started") for message in first)
        assert generate(pair).token_ids == alone.token_ids
        for call in calls:
            call.cancel()
    assert gateway.memory_info().rss - before < 64 * 2**20
    pair.assert_nothing_left()
