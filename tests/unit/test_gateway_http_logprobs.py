"""Where the tokens of a completion begin in its text."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flashduet.v1.common_pb2 import PositionLogprobs, TokenLogprob
from gateway.http.logprobs import CompletionLogprobsWriter, token_text
from gateway.text import ByteDetokenizer


def positions(tokens: list[bytes]) -> list[PositionLogprobs]:
    return [PositionLogprobs(chosen=TokenLogprob(token_id=i, token_bytes=token))
            for i, token in enumerate(tokens)]  # fmt: skip


@given(st.text(), st.data())
def test_offsets_are_where_a_token_s_first_character_is(text: str, data: st.DataObject) -> None:
    """However a text is cut into tokens and these into pieces."""
    whole = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)) | {0, len(whole)})
    tokens = [whole[a:b] for a, b in pairwise(cuts)]
    writer = CompletionLogprobsWriter(lambda _: True)
    split = data.draw(st.integers(0, len(tokens)))
    found = positions(tokens)
    offsets = writer.write(found[:split]).text_offset + writer.write(found[split:]).text_offset
    expected = [len(whole[:start].decode(errors="ignore")) for start in cuts[:-1]]
    assert offsets == expected


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=8))
def test_offsets_never_leave_the_text_of_broken_characters(tokens: list[bytes]) -> None:
    detokenizer = ByteDetokenizer(dict(enumerate(tokens)))
    text = detokenizer.push(range(len(tokens))) + detokenizer.flush()
    offsets = CompletionLogprobsWriter(lambda _: True).write(positions(tokens)).text_offset
    assert offsets == sorted(offsets)
    assert all(offset < len(text) for offset in offsets)


def test_a_broken_character_stands_before_the_next_token() -> None:
    tokens = [b"G", b"\xa0", b"\xd7", b"z", b"\xe4", b"\xbd", b"!"]
    offsets = CompletionLogprobsWriter(lambda _: True).write(positions(tokens)).text_offset
    assert b"".join(tokens).decode(errors="replace") == "G\ufffd\ufffdz\ufffd!"
    assert offsets == [0, 1, 2, 3, 4, 4, 5]


def test_tokens_that_are_left_out_of_the_text_take_no_room_in_it() -> None:
    shown = CompletionLogprobsWriter(lambda token_id: token_id != 1)
    assert shown.write(positions([b"ab", b"<|end|>", b"c"])).text_offset == [0, 2, 2]


def test_json_has_no_infinity() -> None:
    position = PositionLogprobs(chosen=TokenLogprob(token_bytes=b"a", logprob=-math.inf))
    found = CompletionLogprobsWriter(lambda _: True).write([position])
    assert found.token_logprobs == [-9999.0]
    assert found.top_logprobs == [{"a": -9999.0}]


@given(st.sets(st.binary(min_size=1, max_size=4), max_size=20))
def test_tokens_that_differ_look_different(tokens: set[bytes]) -> None:
    assert len({token_text(token) for token in tokens}) == len(tokens)
