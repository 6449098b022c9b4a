"""Completions, whole and in pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from flashduet.v1 import common_pb2 as common
from flashduet.v1 import gateway_pb2 as pb
from gateway.http.logprobs import CompletionLogprobsWriter
from gateway.http.shapes import Completion, CompletionChoice, CompletionLogprobs, FinishReason
from gateway.http.totals import FINISH_REASONS, Totals
from gateway.http.writer import Writer


class CompletionWriter(Writer):
    def __init__(
        self,
        answer_id: str,
        model: str,
        totals: Totals,
        *,
        logprobs: bool,
        in_text: Callable[[int], bool],
    ) -> None:
        """`in_text(id)`: whether a token shows in the text; special ones may not."""
        super().__init__(answer_id, model, totals, logprobs=logprobs)
        self._texts: dict[int, list[str]] = defaultdict(list)
        self._positions: dict[int, list[common.PositionLogprobs]] = defaultdict(list)
        self._logprobs_of = [CompletionLogprobsWriter(in_text) for _ in range(totals.choices)]

    def keep(self, index: int, chunk: pb.GenerateChunk) -> None:
        self._texts[index].append(chunk.text)
        self._positions[index].extend(chunk.logprobs)

    def whole(self) -> Completion:
        choices = [
            self._choice(
                index,
                "".join(self._texts[index]),
                self._logprobs_of[index].write(self._positions[index]) if self._logprobs else None,
                FINISH_REASONS[self.totals.finished[index].finish_reason],
            )
            for index in range(self.totals.choices)
        ]
        return Completion(**self._common, object="text_completion", choices=choices)

    def openings(self) -> Iterator[Completion]:
        return iter(())

    def piece(self, index: int, chunk: pb.GenerateChunk) -> Completion | None:
        if not chunk.text and not chunk.logprobs:
            return None
        logprobs = self._logprobs_of[index].write(chunk.logprobs) if chunk.logprobs else None
        return self._piece(self._choice(index, chunk.text, logprobs, None))

    def closing(self, index: int, finished: pb.GenerateFinished) -> Completion:
        return self._piece(self._choice(index, "", None, FINISH_REASONS[finished.finish_reason]))

    def without_choices(self) -> Completion:
        return self._piece()

    def _piece(self, *choices: CompletionChoice) -> Completion:
        return Completion(**self._common, object="text_completion", choices=list(choices))

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None,
        reason: FinishReason | None,
    ) -> CompletionChoice:
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)
