"""Services that note when their functions begin and end, for `round_timeline.py`.

    python -m stamped.target

runs the target as ever, but with each function named below wrapped. At the process's end the stamps
are written to the folder that STAMPS_DIR names. A stamp costs about 0.3 microseconds. Its clock is
that of `time.perf_counter_ns`, which all processes of a Linux machine share.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAMPS_VARIABLE = "STAMPS_DIR"
BEGIN, END = " (", " )"

# Of each role: where a function is, and what it is called in the timeline.
POINTS = {
    "target": [
        ("target_service.scheduler", "Scheduler._enter", "target: give the engine the round"),
        ("target_service.engine", "Engine.step", "target: step"),
        ("target_service.engine", "choose", "target: choose"),
        ("target_service.scheduler", "_publish", "target: features into the ring"),
        ("target_service.scheduler", "_set_all", "target: outcome in the event loop"),
        ("target_service.decode_stream", "DecodeStream._write", "target: write the answer"),
    ],
    "draft": [
        ("draft_service.ingest_stream", "IngestStream._take", "draft: take the chunk"),
        ("draft_service.propose_stream", "ProposeStream.handle", "draft: take the question"),
        ("draft_service.engine", "Engine._ingest", "draft: context rows"),
        ("draft_service.engine", "Engine._forward", "draft: forward"),
        ("draft_service.choosing", "Chooser.choose", "draft: choose"),
        ("draft_service.scheduler", "Scheduler._deliver", "draft: outcome in the event loop"),
    ],
    "gateway": [
        ("gateway.answer", "Answer.commit", "gateway: commit"),
        ("gateway.draft_session", "DraftSession._ask", "gateway: question to the draft"),
        ("gateway.draft_session", "DraftSession.receive", "gateway: proposal"),
        ("gateway.target_client", "TargetSession._write", "gateway: write the round"),
    ],
}

_stamps: list[tuple[int, str]] = []


def run(role: str, module: str) -> None:
    """Wrap the role's functions and run its module as `python -m` does."""
    import flashduet.grpc_polling
    import flashduet.idle_threads  # noqa: F401

    if role == "gateway":
        # As the gateway itself does before it imports anything.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    for place, path, label in POINTS[role]:
        _wrap(importlib.import_module(place), path, label)
    atexit.register(_write, role)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _write(role: str) -> None:
    Path(os.environ[STAMPS_VARIABLE], f"{role}.json").write_text(json.dumps(_stamps))


def _wrap(owner: Any, path: str, label: str) -> None:
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    plain = inspect.getattr_static(owner, name)
    inner = plain.__func__ if isinstance(plain, staticmethod) else plain
    stamped = (_stamped_coroutine if inspect.iscoroutinefunction(inner) else _stamped)(inner, label)
    setattr(owner, name, staticmethod(stamped) if isinstance(plain, staticmethod) else stamped)


def _stamped(inner: Callable[..., Any], label: str) -> Callable[..., Any]:
    begin, end, add, now = label + BEGIN, label + END, _stamps.append, time.perf_counter_ns

    @functools.wraps(inner)
    def stamped(*arguments: Any, **named: Any) -> Any:
        add((now(), begin))
        try:
            return inner(*arguments, **named)
        finally:
            add((now(), end))

    return stamped


def _stamped_coroutine(inner: Callable[..., Any], label: str) -> Callable[..., Any]:
    begin, end, add, now = label + BEGIN, label + END, _stamps.append, time.perf_counter_ns

    @functools.wraps(inner)
    async def stamped(*arguments: Any, **named: Any) -> Any:
        add((now(), begin))
        try:
            return await inner(*arguments, **named)
        finally:
            add((now(), end))

    return stamped
