"""Log-probabilities in the two forms that OpenAI has for them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from flashduet.v1 import common_pb2 as common
from gateway.http.shapes import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

# What OpenAI says of a token that cannot be; JSON has no infinity.
_LEAST = -9999.0


def chat_logprobs(positions: Sequence[common.PositionLogprobs]) -> ChatLogprobs:
    content = [
        TokenLogprob(
            token=token_text(position.chosen.token_bytes),
            logprob=_finite(position.chosen.logprob),
            bytes=list(position.chosen.token_bytes),
            top_logprobs=[
                TopLogprob(
                    token=token_text(token.token_bytes),
                    logprob=_finite(token.logprob),
                    bytes=list(token.token_bytes),
                )
                for token in position.top
            ],
        )
        for position in positions
    ]
    return ChatLogprobs(content=content, refusal=None)


class CompletionLogprobsWriter:
    """One choice's, in pieces; it remembers where in the text the next token begins."""

    def __init__(self, in_text: Callable[[int], bool]) -> None:
        """`in_text(id)`: whether the token shows in the text; special ones may not."""
        self._in_text = in_text
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, positions: Sequence[common.PositionLogprobs]) -> CompletionLogprobs:
        offsets = []
        for position in positions:
            token = position.chosen.token_bytes
            shown = self._in_text(position.chosen.token_id)
            # A character that was begun and is not gone on with shows as one U+FFFD before this.
            broken_off = shown and bool(self._decoder.getstate()[0]) and not _goes_on(token)
            offsets.append(self._offset + broken_off)
            if shown:
                self._offset += len(self._decoder.decode(token))
        return CompletionLogprobs(
            tokens=[token_text(position.chosen.token_bytes) for position in positions],
            token_logprobs=[_finite(position.chosen.logprob) for position in positions],
            top_logprobs=[_by_token(position) for position in positions],
            text_offset=offsets,
        )


def _goes_on(token: bytes) -> bool:
    """Whether it begins with a byte from the middle of a character."""
    return bool(token) and 0x80 <= token[0] < 0xC0


def token_text(token: bytes) -> str:
    """The token as text; a part of a character is spelled out, so that no two look the same."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _by_token(position: common.PositionLogprobs) -> dict[str, float]:
    """The most likely tokens and the chosen one, which need not be among them."""
    found = {token_text(token.token_bytes): _finite(token.logprob) for token in position.top}
    chosen = position.chosen
    return found | {token_text(chosen.token_bytes): _finite(chosen.logprob)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
