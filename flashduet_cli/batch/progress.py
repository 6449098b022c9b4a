"""A run's progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)

from flashduet_cli.console import err, note

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.25


class BatchProgress:
    """Counts prompts and tokens; tokens a second are of the whole run so far."""

    def __init__(self, total: int, already: int) -> None:
        """
        Args:
            total: prompts of the file.
            already: those among them that an earlier run answered.
        """
        self._total, self._done, self._failed, self._tokens = total, already, 0, 0
        self._already = already
        # Of those prompts of this run that are done.
        self._ended_tokens = 0
        self._started_at = time.monotonic()
        self._said_at = self._started_at
        self._bar: Progress | None = None
        if err.is_terminal:
            self._bar = Progress(
                TextColumn("answering"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}, {task.fields[left]}"),
                console=err,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(
                "", total=total, completed=already, rate=self._rate(), left=self._left()
            )

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / max(time.monotonic() - self._started_at, 1e-9)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_at

    def tokens(self, count: int) -> None:
        self._tokens += count
        now = time.monotonic()
        if now - self._said_at < (_LINE_EVERY_S if self._bar is None else _BAR_EVERY_S):
            return
        self._said_at = now
        if self._bar is None:
            note(f"{self._done} of {self._total} prompts, {self._rate()}, {self._left()}")
        else:
            self._bar.update(self._task, rate=self._rate(), left=self._left())

    def done(self, *, failed: bool, tokens: int) -> None:
        self._done += 1
        self._failed += failed
        self._ended_tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=self._rate(), left=self._left())

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _rate(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self.tokens_per_second:.0f} tokens/s{failed}"

    def _left(self) -> str:
        """Prompts are answered many at a time, so what counts is tokens: those still to come.

        Unfinished prompts are taken to get as many as the finished ones did. The first to finish
        are the shortest, which shows when more have come than that makes in all.
        """
        ended = self._done - self._already
        if not ended or not self._tokens:
            return "time left unknown"
        wanted = self._ended_tokens / ended * (self._total - self._already)
        if wanted <= self._tokens and self._done < self._total:
            return "time left unknown"
        seconds = max(wanted - self._tokens, 0) / self.tokens_per_second
        return f"about {seconds:.0f} s left"
