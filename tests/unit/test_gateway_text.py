"""Text from tokens: whole characters, no part of a stop string, the same however it is grouped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text import AnswerText, ByteDetokenizer, StopMatcher

BYTES = {byte: bytes([byte]) for byte in range(256)}

# Every kind of difficulty: emoji with joiners, CJK, Devanagari with combining signs, flags.
SCRIPTS = "naïve 👩‍👩‍👧‍👦 你好世界 नमस्ते दुनिया 🇫🇷 e\u0301 \U0001f9d1\u200d\U0001f680 końc"


def groupings(items: list[int]) -> st.SearchStrategy[list[list[int]]]:
    """Every way in which rounds could have grouped the tokens."""
    cuts = st.sets(st.integers(1, max(len(items) - 1, 1)))

    def cut(at: set[int]) -> list[list[int]]:
        edges = [0, *sorted(edge for edge in at if edge < len(items)), len(items)]
        return [items[a:b] for a, b in itertools.pairwise(edges)]

    return cuts.map(cut)


def reference_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, said plainly: the first character at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.data())
def test_characters_split_over_tokens_come_out_whole(data: st.DataObject) -> None:
    ids = list(SCRIPTS.encode())
    detokenizer = ByteDetokenizer(BYTES)
    pieces = [detokenizer.push(group) for group in data.draw(groupings(ids))]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == SCRIPTS
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=40), st.data())
def test_broken_bytes_decode_as_they_do_all_at_once(raw: bytes, data: st.DataObject) -> None:
    detokenizer = ByteDetokenizer(BYTES)
    groups = data.draw(groupings(list(raw))) if raw else []
    text = "".join(detokenizer.push(group) for group in groups) + detokenizer.flush()
    assert text == raw.decode(errors="replace")


def test_an_incomplete_character_is_held_and_given_up_only_at_the_end() -> None:
    detokenizer = ByteDetokenizer(BYTES)
    assert detokenizer.push("a€".encode()[:-1]) == "a"
    assert detokenizer.push([]) == ""
    assert detokenizer.flush() == "\ufffd"


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.data(),
)
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    expected, expected_stop = reference_cut(text, stops)
    matcher = StopMatcher(stops)
    sent, stop = "", None
    for group in data.draw(groupings([ord(c) for c in text])):
        more, stop = matcher.push("".join(map(chr, group)))
        sent += more
        # Nothing that has been sent can be part of the stop string that comes in the end.
        assert expected.startswith(sent)
        if stop is not None:
            break
    if stop is None:
        sent += matcher.flush()
    assert (sent, stop) == (expected, expected_stop)


@given(
    st.text("ab€😀", max_size=20),
    st.lists(st.text("ab€😀", min_size=1, max_size=3), min_size=1, max_size=3),
    st.data(),
)
def test_stop_strings_across_token_borders(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    expected, expected_stop = reference_cut(text, stops)
    answer = AnswerText(ByteDetokenizer(BYTES), stops)
    sent, used, stop = "", 0, None
    for group in data.draw(groupings(list(text.encode()))):
        piece = answer.push(group)
        sent, used, stop = sent + piece.text, used + piece.used, piece.stop
        if stop is not None:
            break
    if stop is None:
        sent += answer.finish().text
        assert used == len(text.encode())
    else:
        # Exactly the tokens up to the one that completed the stop string.
        assert used == len((expected + stop).encode())
    assert (sent, stop) == (expected, expected_stop)


@pytest.mark.parametrize(
    ("pieces", "sent"),
    [
        (["Hello ST", "OP now"], ["Hello ", ""]),
        (["Hello ST", "ART"], ["Hello ", "START"]),
        (["S", "S", "T", "S", "TOP"], ["", "S", "", "ST", ""]),
    ],
)
def test_what_may_become_a_stop_string_is_held(pieces: list[str], sent: list[str]) -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece)[0] for piece in pieces] == sent


def test_without_stop_strings_nothing_is_held() -> None:
    answer = AnswerText(ByteDetokenizer(BYTES), ())
    assert answer.push(list(b"abc")).text == "abc"
    assert answer.finish().text == ""
