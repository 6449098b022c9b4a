"""Getting a model into the user's cache with a progress bar."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from flashduet.models import DEFAULT_NAMES, resolve_model
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
    if reference.lower() in DEFAULT_NAMES or reference.endswith(".gguf"):
        # Transformers would draw its own bar over this one while it converts.
        os.environ.setdefault("TQDM_DISABLE", "1")

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            if err.is_terminal:
                bar.start()
            elif stage != "checking":
                note(f"{reference}: {stage} ({total / 1e6:.0f} MB)")
            tasks[stage] = bar.add_task(f"{reference}: {stage}", total=total or None)
        bar.update(tasks[stage], completed=done, refresh=True)

    try:
        return resolve_model(reference, progress=show)
    finally:
        if err.is_terminal:
            bar.stop()


async def pull_in_thread(reference: str) -> Path:
    """`pull` without holding up the event loop, which passes on the services' logs."""
    return await asyncio.to_thread(pull, reference)
