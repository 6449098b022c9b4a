"""Chat completions, whole and in chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flashduet.v1 import common_pb2 as common
from flashduet.v1 import gateway_pb2 as pb
from gateway.http.logprobs import chat_logprobs
from gateway.http.shapes import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    FinishReason,
)
from gateway.http.totals import FINISH_REASONS, Totals
from gateway.http.writer import Writer


class ChatWriter(Writer):
    def __init__(self, answer_id: str, model: str, totals: Totals, *, logprobs: bool) -> None:
        super().__init__(answer_id, model, totals, logprobs=logprobs)
        self._texts: dict[int, list[str]] = defaultdict(list)
        self._positions: dict[int, list[common.PositionLogprobs]] = defaultdict(list)

    def keep(self, index: int, chunk: pb.GenerateChunk) -> None:
        self._texts[index].append(chunk.text)
        self._positions[index].extend(chunk.logprobs)

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(
                    role="assistant", content="".join(self._texts[index]), refusal=None
                ),
                logprobs=chat_logprobs(self._positions[index]) if self._logprobs else None,
                finish_reason=FINISH_REASONS[self.totals.finished[index].finish_reason],
            )
            for index in range(self.totals.choices)
        ]
        return ChatCompletion(**self._common, object="chat.completion", choices=choices)

    def openings(self) -> Iterator[ChatCompletionChunk]:
        """Whose words follow."""
        for index in range(self.totals.choices):
            yield self._chunk(index, ChatDelta(role="assistant", content=""))

    def piece(self, index: int, chunk: pb.GenerateChunk) -> ChatCompletionChunk | None:
        if not chunk.text and not chunk.logprobs:
            return None
        logprobs = chat_logprobs(chunk.logprobs) if chunk.logprobs else None
        return self._chunk(index, ChatDelta(content=chunk.text), logprobs)

    def closing(self, index: int, finished: pb.GenerateFinished) -> ChatCompletionChunk:
        return self._chunk(index, ChatDelta(), reason=FINISH_REASONS[finished.finish_reason])

    def without_choices(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._common, object="chat.completion.chunk", choices=[])

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        return ChatCompletionChunk(**self._common, object="chat.completion.chunk", choices=[choice])
