"""What is known of an HTTP request's answers when they are over, summed over its prompts."""

from __future__ import annotations

from collections import Counter

from flashduet.v1 import gateway_pb2 as pb
from gateway.http.answers import Event
from gateway.http.shapes import FinishReason, FlashduetStats, MetaInfo, PromptTokensDetails, Usage

FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


class Totals:
    """Sums of `prompts` requests of the core, each with `choices` answers."""

    def __init__(self, prompts: int, choices: int) -> None:
        self.choices = prompts * choices
        self.finished: dict[int, pb.GenerateFinished] = {}
        self._choices_each = choices
        self._prompts = prompts
        self._started: dict[int, pb.GenerateStarted] = {}
        self._complete: dict[int, pb.GenerateComplete] = {}

    def add(self, event: Event) -> None:
        response = event.response
        match response.WhichOneof("message"):
            case "started":
                self._started[event.prompt] = response.started
            case "finished":
                self.finished[self.index(event.prompt, response.finished.choice)] = (
                    response.finished
                )
            case "complete":
                self._complete[event.prompt] = response.complete

    def index(self, prompt: int, choice: int) -> int:
        """The choice's number in the whole answer: all of the first prompt's come first."""
        return prompt * self._choices_each + choice

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == self.choices

    @property
    def over(self) -> bool:
        return len(self._complete) == self._prompts

    @property
    def first_started(self) -> pb.GenerateStarted | None:
        """What was said at the start of the first prompt that began."""
        return self._started[min(self._started)] if self._started else None

    def usage(self) -> Usage:
        prompt = sum(complete.usage.prompt_tokens for complete in self._complete.values())
        answered = sum(complete.usage.completion_tokens for complete in self._complete.values())
        cached = sum(complete.usage.cached_tokens for complete in self._complete.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=answered,
            total_tokens=prompt + answered,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def stats(self) -> FlashduetStats:
        all_stats = [complete.speculation for complete in self._complete.values()]
        rounds = sum(stats.rounds for stats in all_stats)
        committed = sum(stats.acceptance_length * stats.rounds for stats in all_stats)
        undrafted: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for stats in all_stats:
            undrafted.update({item.reason: item.count for item in stats.undrafted_rounds})
            seconds.update({item.phase: item.seconds for item in stats.phases})  # type: ignore[dict-item]
        first = self.first_started
        return FlashduetStats(
            rounds=rounds,
            drafted_rounds=sum(stats.drafted_rounds for stats in all_stats),
            drafted_tokens=sum(stats.drafted_tokens for stats in all_stats),
            accepted_tokens=sum(stats.accepted_tokens for stats in all_stats),
            copied_tokens=sum(stats.copied_tokens for stats in all_stats),
            accepted_copied_tokens=sum(stats.accepted_copied_tokens for stats in all_stats),
            acceptance_length=committed / rounds if rounds else 0.0,
            undrafted_rounds=dict(undrafted),
            seconds=dict(seconds),
            seeds=[self._started[prompt].seed for prompt in sorted(self._started)],
            trace_id=(first.trace_id if first is not None else "") or None,
        )

    def meta_info(self, answer_id: str, seconds: float) -> MetaInfo:
        """`seconds`: since the request came. Why the first choice ended stands for all."""
        usage, stats, first = self.usage(), self.stats(), self.finished[0]
        reason: dict[str, object] = {"type": FINISH_REASONS[first.finish_reason]}
        if first.finish_reason == pb.FINISH_REASON_LENGTH:
            reason["length"] = first.completion_tokens
        elif first.HasField("stop_string"):
            reason["matched"] = first.stop_string
        elif first.HasField("stop_token_id"):
            reason["matched"] = first.stop_token_id
        info = MetaInfo(
            id=answer_id,
            finish_reason=reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            e2e_latency=seconds,
            spec_verify_ct=stats.rounds,
        )
        # An answer of one token says nothing of rounds, and would spoil a benchmark's mean.
        if stats.rounds:
            info.spec_accept_length = stats.acceptance_length
        return info
