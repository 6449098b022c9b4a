"""From committed token ids to the text that may be sent, a block at a time.

What is sent never depends on how tokens were grouped into rounds, and the pieces together equal
the tokenizer's decode of all tokens at once: characters whose bytes lie in several tokens are held
until they are whole, and so is anything that a stop string may still grow from.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text of one answer's tokens, as soon as it cannot change any more."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """What was still held, broken characters as U+FFFD; the answer is over."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies, where a token is a string of bytes wherever it stands.

    Python's incremental decoder puts one U+FFFD for each maximal broken part, like the tokenizers
    library, so that the pieces are exact without looking back.
    """

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        """`token_bytes[id]`: bytes of a token; empty for one that is left out of the text."""
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._bytes
        return self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a few last tokens with and without the new ones.

    The older of the two windows is context for what depends on neighbours (SentencePiece strips the
    space of a text's first piece only). It never starts or ends inside a character: text is held
    while the last token is one that a later token may still change.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        skipped: Callable[[int], bool],
        may_change: Callable[[int, str], bool],
    ) -> None:
        """
        Args:
            decode: text of the ids, which are never `skipped` ones.
            skipped: whether an id leaves no text at all (special or unknown).
            may_change: whether the end of the text may change with the token after this last one.
        """
        self._decode = decode
        self._skipped = skipped
        self._may_change = may_change
        self._window: list[int] = []
        # The window's first tokens, whose text has been given out already, and that text.
        self._given = 0
        self._given_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        new = [token_id for token_id in token_ids if not self._skipped(token_id)]
        if not new:
            return ""
        self._window += new
        text = self._decode(self._window)
        if self._may_change(new[-1], text):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        if len(self._window) == self._given:
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._given_text) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._given_text = self._decode(self._window)
        return piece


class StopMatcher:
    """Cuts a text before the stop string that is complete first, and sends none of its characters.

    Of two that end at the same character the longer one counts. This makes the cut depend on the
    text alone, not on the pieces it comes in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Text that may be sent, and the stop string if it is now complete."""
        text = self._held + piece
        hit: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (hit is None or (start + len(stop), start) < hit[:2]):
                hit = (start + len(stop), start, stop)
        if hit is not None:
            self._held = ""
            return text[: hit[1]], hit[2]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class Piece:
    """What a block of tokens adds to an answer."""

    text: str
    # How many of the tokens belong to the answer: all, or those up to the one completing `stop`.
    used: int
    stop: str | None = None


class AnswerText:
    """The text of one answer: a detokenizer, then the search for stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Add tokens; where a stop string is complete the rest of them is not looked at."""
        if self._matcher is None:
            return Piece(self._detokenizer.push(token_ids), len(token_ids))
        # One by one, to know which token completed the stop string.
        sent = ""
        for index, token_id in enumerate(token_ids):
            text, stop = self._matcher.push(self._detokenizer.push((token_id,)))
            sent += text
            if stop is not None:
                return Piece(sent, index + 1, stop)
        return Piece(sent, len(token_ids))

    def finish(self) -> Piece:
        """What was held, for an answer that ends without a stop string (`used` is 0)."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return Piece(rest, 0)
        text, stop = self._matcher.push(rest)
        return Piece(text if stop else text + self._matcher.flush(), 0, stop)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not the whole, of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
