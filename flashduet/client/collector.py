"""Puts the messages of one stream together again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashduet.client.results import (
    Choice,
    FinishReason,
    Generation,
    PositionLogprobs,
    SpeculationReport,
    TextChunk,
    TokenLogprob,
    TokenUsage,
)
from flashduet.errors import FlashduetError
from flashduet.v1 import common_pb2, gateway_pb2

_FINISH_REASONS: Mapping[int, FinishReason] = {
    gateway_pb2.FINISH_REASON_STOP: "stop",
    gateway_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class _Growing:
    """One answer on its way."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finished: gateway_pb2.GenerateFinished | None = None


class Collector:
    """Gathers one stream's messages: Started, chunks, a Finished a choice, the Complete at the end.

    Shared by the sync and the async client, which differ only in how messages arrive.
    """

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._first_token_at: float | None = None
        self._started: gateway_pb2.GenerateStarted | None = None
        self._complete: gateway_pb2.GenerateComplete | None = None
        self._ended_at = started_at
        self._answers: dict[int, _Growing] = {}

    def add(self, message: gateway_pb2.GenerateResponse, now: float) -> TextChunk | None:
        """Take one message; a TextChunk is returned where it is one, or the end of a choice.

        Raises:
            FlashduetError: the gateway says something that no gateway says.
        """
        kind = message.WhichOneof("message")
        if kind == "started":
            self._started = message.started
        elif kind == "complete":
            self._complete, self._ended_at = message.complete, now
        elif kind == "finished":
            finished = message.finished
            self._answer(finished.choice).finished = finished
            return TextChunk("", [], finished.choice, (), _reason(finished.finish_reason))
        elif kind == "chunk":
            return self._add_chunk(message.chunk, now)
        return None

    def generation(self) -> Generation:
        """The whole answers.

        Raises:
            FlashduetError: the stream ended before its Complete.
        """
        if self._started is None or self._complete is None:
            raise FlashduetError("the gateway's stream ended before the answer was complete")
        started, complete = self._started, self._complete
        first_token_at = self._first_token_at or self._ended_at
        return Generation(
            choices=tuple(_choice(self._answers[index]) for index in sorted(self._answers)),
            usage=TokenUsage(
                complete.usage.prompt_tokens,
                complete.usage.completion_tokens,
                complete.usage.cached_tokens,
            ),
            speculation=_report(complete.speculation),
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            trace_id=started.trace_id,
            seconds=self._ended_at - self._started_at,
            first_token_seconds=first_token_at - self._started_at,
        )

    def _answer(self, choice: int) -> _Growing:
        return self._answers.setdefault(choice, _Growing())

    def _add_chunk(self, message: gateway_pb2.GenerateChunk, now: float) -> TextChunk:
        chunk = TextChunk(
            message.text,
            list(message.token_ids),
            message.choice,
            tuple(map(_logprobs, message.logprobs)),
        )
        if chunk.token_ids and self._first_token_at is None:
            self._first_token_at = now
        answer = self._answer(chunk.choice)
        answer.texts.append(chunk.text)
        answer.token_ids.extend(chunk.token_ids)
        answer.logprobs.extend(chunk.logprobs)
        return chunk


def _choice(answer: _Growing) -> Choice:
    finished = answer.finished
    if finished is None:
        raise FlashduetError("the gateway completed a request before all of its answers")
    return Choice(
        text="".join(answer.texts),
        token_ids=list(answer.token_ids),
        finish_reason=_reason(finished.finish_reason),
        stop_string=finished.stop_string if finished.HasField("stop_string") else None,
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        logprobs=tuple(answer.logprobs),
    )


def _reason(reason: gateway_pb2.FinishReason) -> FinishReason:
    known = _FINISH_REASONS.get(reason)
    if known is None:
        raise FlashduetError(f"the gateway gave finish reason {reason}")
    return known


def _logprobs(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(_logprob(message.chosen), tuple(map(_logprob, message.top)))


def _logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.token_bytes, message.logprob)


def _report(stats: gateway_pb2.SpeculationStats) -> SpeculationReport:
    return SpeculationReport(
        rounds=stats.rounds,
        drafted_rounds=stats.drafted_rounds,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        acceptance_length=stats.acceptance_length,
        phases={item.phase: item.seconds for item in stats.phases},
        undrafted_rounds={item.reason: item.count for item in stats.undrafted_rounds},
        copied_tokens=stats.copied_tokens,
        accepted_copied_tokens=stats.accepted_copied_tokens,
    )
