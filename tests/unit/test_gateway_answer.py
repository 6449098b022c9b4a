"""Where an answer ends, and what counts of its last round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashduet.sampling.params import Sampling
from flashduet.v1 import gateway_pb2 as pb
from gateway.answer import Answer
from gateway.request import Speculation, SpeculationMode, ValidRequest
from gateway.text import ByteDetokenizer

END = 256
BYTES = {byte: bytes([byte]) for byte in range(256)} | {END: b""}
PROMPT = (END, 1, 2)


def answer(max_tokens: int = 100, stops: tuple[str, ...] = ()) -> Answer:
    request = ValidRequest(
        request_id="r",
        model="m",
        prompt_ids=PROMPT,
        max_tokens=max_tokens,
        sampling=Sampling(),
        speculation=Speculation(SpeculationMode.AUTO),
        stops=stops,
        stop_ids=frozenset([END]),
    )
    return Answer(request, ByteDetokenizer(BYTES), BYTES.__getitem__)


def test_tokens_past_a_stop_id_count_in_nothing() -> None:
    growing = answer()
    chunk = growing.commit([*b"ab", END, *b"cd"])
    assert (chunk.text, list(chunk.token_ids)) == ("ab", [*b"ab", END])
    assert growing.tokens == 3
    assert growing.finish_reason == pb.FINISH_REASON_STOP
    assert growing.stop == END


def test_tokens_past_a_stop_string_count_in_nothing() -> None:
    growing = answer(stops=("END",))
    growing.commit(list(b"so E"))
    chunk = growing.commit([*b"ND, more", END])
    assert (chunk.text, list(chunk.token_ids)) == ("", list(b"ND"))
    assert growing.tokens == 6
    assert (growing.finish_reason, growing.stop) == (pb.FINISH_REASON_STOP, "END")


def test_the_budget_cuts_a_round_and_gives_out_what_was_held() -> None:
    growing = answer(max_tokens=3, stops=("xyz",))
    chunk = growing.commit(list(b"axyz"))
    assert (chunk.text, growing.tokens, growing.wanted) == ("axy", 3, 0)
    assert growing.finish_reason == pb.FINISH_REASON_LENGTH
    assert growing.stop is None


def test_a_stop_id_before_the_stop_string_is_whole_gives_out_what_was_held() -> None:
    growing = answer(stops=("xyz",))
    chunk = growing.commit([*b"axy", END])
    assert (chunk.text, growing.stop) == ("axy", END)


def test_a_stop_id_that_comes_with_the_last_token_of_the_budget_is_a_stop() -> None:
    growing = answer(max_tokens=2)
    growing.commit([65, END])
    assert growing.finish_reason == pb.FINISH_REASON_STOP


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    assert answer(max_tokens=2).commit("é".encode()[:1] + b"").text == ""
    assert answer(max_tokens=1).commit("é".encode()[:1]).text == "\ufffd"


def test_a_stop_id_in_the_prompt_ends_nothing() -> None:
    growing = answer()
    growing.commit([65])
    assert not growing.finish_reason
    assert (growing.length, growing.anchor) == (len(PROMPT) + 1, 65)


@given(
    st.lists(st.sampled_from([*b"abc", END, *"é".encode()]), min_size=1, max_size=20),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
    st.integers(1, 12),
    st.sampled_from([(), ("ab",), ("ca", "bc"), ("éa",)]),
)
def test_the_answer_does_not_depend_on_the_rounds(
    tokens: list[int], sizes: list[int], max_tokens: int, stops: tuple[str, ...]
) -> None:
    """One token a round is plain decoding; any other grouping must end in the same place."""

    def run(groups: list[list[int]]) -> tuple[object, ...]:
        growing, text, ids = answer(max_tokens, stops), "", []
        for group in groups:
            if growing.finish_reason:
                break
            chunk = growing.commit(group)
            text, ids = text + chunk.text, ids + list(chunk.token_ids)
        return text, ids, growing.finish_reason, growing.stop, growing.tokens, growing.anchor

    groups, start = [], 0
    for size in sizes:
        if tokens[start : start + size]:
            groups.append(tokens[start : start + size])
        start += size
    if start < len(tokens):
        groups.append(tokens[start:])
    assert run(groups) == run([[token] for token in tokens])


@pytest.mark.parametrize("block", [1, 3])
def test_wanted_falls_to_zero_exactly(block: int) -> None:
    growing = answer(max_tokens=7)
    while not growing.finish_reason:
        growing.commit([65] * block)
    assert (growing.tokens, growing.wanted) == (7, 0)
