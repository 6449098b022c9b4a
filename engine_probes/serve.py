"""The requests of a probe: {"do": name, ...arguments} a line; the answer is result or error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping

Commands = Mapping[str, Callable[..., object]]


def serve(commands: Commands) -> None:
    """Answer requests until standard input ends, which it does with the process that started us."""
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, object] = {"result": commands[request.pop("do")](**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of so many calls."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times
