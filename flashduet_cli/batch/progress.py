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
    TimeRemainingColumn,
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
        self._started_at = time.monotonic()
        self._said_at = self._started_at
        self._bar: Progress | None = None
        if err.is_terminal:
            self._bar = Progress(
                TextColumn("answering"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=err,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=total, completed=already, rate="")

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
            self._bar.update(self._task, rate=self._rate())

    def done(self, *, failed: bool) -> None:
        self._done += 1
        self._failed += failed
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=self._rate())

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
        done = self._done - self._already
        if not done:
            return "time left unknown"
        seconds = self.seconds / done * (self._total - self._done)
        return f"about {seconds:.0f} s left"
