"""Getting a model into the user's cache with a progress bar."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from flashduet.models import resolve_model
from flashduet_cli.console import err, note


def pull(reference: str) -> Path:
    """The local folder of a model, downloaded and converted if need be.

    Raises:
        ConfigurationError, CheckpointError: see `flashduet.models.resolve_model`.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=err,
        # Nothing is drawn before the first stage, so a cached model shows nothing.
        auto_refresh=False,
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            if not err.is_terminal and total > 0:
                note(f"{reference}: {stage} ({total / 1e6:.0f} MB)")
            bar.start()
            tasks[stage] = bar.add_task(f"{reference}: {stage}", total=total or None)
        bar.update(tasks[stage], completed=done, refresh=True)

    try:
        return resolve_model(reference, progress=show)
    finally:
        bar.stop()


async def pull_in_thread(reference: str) -> Path:
    """`pull` without holding up the event loop, which passes on the services' logs."""
    return await asyncio.to_thread(pull, reference)
