"""One answer as it grows: what has been committed, what of it may be sent, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashduet.errors import FlashduetError
from flashduet.v1.common_pb2 import PositionLogprobs
from flashduet.v1.gateway_pb2 import FinishReason, GenerateChunk
from gateway.request import ValidRequest
from gateway.text import AnswerText, Detokenizer


class Answer:
    """Owns the committed sequence of one answer to a request.

    Attributes:
        choice: its index among the request's answers.
        length: committed tokens, prompt included; what the wire calls committed_length.
        anchor: the last committed token, whose position is `length - 1`.
        wanted: tokens that may still follow.
        finish_reason: why the answer is over; UNSPECIFIED (0) while it is not.
        stop: the stop string or token id that ended it, if one did.
    """

    def __init__(
        self,
        request: ValidRequest,
        detokenizer: Detokenizer,
        token_bytes: Callable[[int], bytes],
        choice: int = 0,
    ) -> None:
        """`token_bytes`: what a token stands for, to be told with its logprob."""
        self.choice = choice
        self.length = len(request.prompt_ids)
        self.anchor = request.prompt_ids[-1]
        self.wanted = request.max_tokens
        self.finish_reason = FinishReason.FINISH_REASON_UNSPECIFIED
        self.stop: str | int | None = None
        self._prompt_length = self.length
        self._stop_ids = request.stop_ids
        self._text = AnswerText(detokenizer, request.stops)
        self._unsaid = request.echo
        self._token_bytes = token_bytes
        self._with_logprobs = request.top_logprobs is not None

    @property
    def tokens(self) -> int:
        """Tokens answered so far; a stop token counts, what was verified past it does not."""
        return self.length - self._prompt_length

    def commit(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()
    ) -> GenerateChunk:
        """Take the target's next tokens, at least one, and return what the client gets of them.

        A stop token is part of the ids and never of the text. Only new tokens are looked at, so a
        stop id in the prompt ends nothing.

        Args:
            token_ids: the accepted draft tokens and the bonus.
            logprobs: one a token where the request asked for them; they are told for the tokens
                that are, whether or not their text is held back yet.

        Raises:
            FlashduetError: the target told other logprobs than were asked for.
        """
        kept = token_ids[: self.wanted]
        end = next((i for i, token_id in enumerate(kept) if token_id in self._stop_ids), None)
        piece = self._text.push(kept if end is None else kept[:end])
        text, stop = piece.text, piece.stop
        if stop is None and (end is not None or len(kept) == self.wanted):
            last = self._text.finish()
            text, stop = text + last.text, last.stop
        if piece.stop is not None:
            kept = kept[: piece.used]
        elif end is not None:
            kept = kept[: end + 1]
        self._end(kept, stop, ended_by_id=end is not None)
        if self._unsaid:
            text, self._unsaid = self._unsaid + text, ""
        chunk = GenerateChunk(text=text, token_ids=kept, choice=self.choice)
        if self._with_logprobs:
            if [entry.chosen.token_id for entry in logprobs] != list(token_ids):
                raise FlashduetError("the target told logprobs of other tokens than it chose")
            chunk.logprobs.extend(logprobs[: len(kept)])
            self._spell(chunk)
        return chunk

    def _spell(self, chunk: GenerateChunk) -> None:
        for entry in chunk.logprobs:
            for token in (entry.chosen, *entry.top):
                token.token_bytes = self._token_bytes(token.token_id)

    def _end(self, kept: Sequence[int], stop: str | None, *, ended_by_id: bool) -> None:
        self.length += len(kept)
        self.wanted -= len(kept)
        self.anchor = kept[-1]
        if stop is not None or ended_by_id:
            self.stop = stop if stop is not None else self.anchor
            self.finish_reason = FinishReason.FINISH_REASON_STOP
        elif self.wanted == 0:
            self.finish_reason = FinishReason.FINISH_REASON_LENGTH
