"""Where a round of one session goes: python benchmarks/round_timeline.py

Starts a stack of the default pair whose services note when their functions begin and end, asks for
some answers one after the other, and prints for each point of a round the median of the
microseconds since the target's step before it was over. A point is left out where fewer than half
of the rounds have it. `--plain` does the same without drafting, `--out FILE` keeps all stamps.

The stamps' own cost is within a round's, and a machine that does something else shows that above
all: compare medians of runs in turn, and the share of the passes rather than seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import statistics
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from pathlib import Path

from stamped import BEGIN, END, STAMPS_VARIABLE

from flashduet.client import AsyncClient
from flashduet.sampling.params import Sampling
from flashduet_cli.stack import Stack, StackConfig

PROMPTS = (
    "Explain the tides to a curious child, with one example from daily life.",
    "List seven facts about bread and say of each why it matters.",
    "Write a Python function that has to do with maps, and explain how it works.",
    "Summarize the history of glaciers in five sentences.",
    "Invent a dialogue between two experts who disagree about bicycles.",
)
STEP_OVER = "target: step" + END
# The first rounds of an answer are dearer than the rest.
WARM_ROUNDS = 3
Stamps = list[tuple[int, str]]


async def measure(options: argparse.Namespace, folder: Path) -> list[float]:
    """Milliseconds of a round of each answer; the stamps are in the folder afterwards."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [inherited])])
    config = StackConfig(
        free_ports=True,
        draft=not options.plain,
        dtype="bfloat16",
        env={
            "PYTHONPATH": path,
            STAMPS_VARIABLE: str(folder),
            "FLASHDUET_TARGET_MAX_KV_TOKENS": "16384",
            "FLASHDUET_DRAFT_LOOKUP": "0",  # a copy has no pass to be seen
        },
        modules={role: f"stamped.{role}" for role in ("target", "draft", "gateway")},
    )
    rounds = []
    async with (
        Stack(config, log=_quiet, event=_quiet) as stack,
        AsyncClient(stack.endpoint) as client,
    ):
        for number in range(options.answers + 1):
            answer = await client.generate(
                PROMPTS[number % len(PROMPTS)],
                max_tokens=options.tokens,
                speculation="off" if options.plain else "fixed",
                sampling=Sampling(),
                ignore_eos=True,
                cache_salt=secrets.token_hex(8),
            ).result()
            seconds = answer.seconds - answer.first_token_seconds
            if number:  # the first one warms up
                rounds.append(seconds / max(1, answer.speculation.rounds) * 1e3)
    return rounds


def timeline(stamps: Stamps) -> tuple[list[tuple[float, str]], float, int]:
    """Points of a round with their median microseconds since the step before, the median length of
    a round, and how many there were."""
    stamps.sort()
    times = [when for when, _ in stamps]
    steps = [when for when, what in stamps if what == STEP_OVER]
    # Two steps with a prefill or a pause between them are no round.
    usual = statistics.median(b - a for a, b in itertools.pairwise(steps))
    spans = [(a, b) for a, b in itertools.pairwise(steps) if b - a < 2 * usual]
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for begin, end in spans[WARM_ROUNDS:]:
        seen: Counter[str] = Counter()
        for when, what in stamps[bisect_left(times, begin) : bisect_left(times, end)]:
            found[what, seen[what]].append((when - begin) / 1e3)
            seen[what] += 1
    enough = len(spans[WARM_ROUNDS:]) / 2
    points = [
        (statistics.median(offsets), what)
        for (what, _), offsets in found.items()
        if len(offsets) > enough
    ]
    length = statistics.median((end - begin) / 1e3 for begin, end in spans[WARM_ROUNDS:])
    return sorted(points), length, len(spans[WARM_ROUNDS:])


def _quiet(service: str, line: str) -> None:
    """A failed start still shows the last lines."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without drafting")
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--out", type=Path, help="keep all stamps, as JSON, in this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = asyncio.run(measure(options, Path(folder)))
        stamps: Stamps = []
        for file in sorted(Path(folder).glob("*.json")):
            stamps += [(when, what) for when, what in json.loads(file.read_text())]
    if options.out is not None:
        options.out.write_text(json.dumps(stamps))
    points, length, count = timeline(stamps)
    print(f"{count} rounds of {length:.0f} us by the stamps, {statistics.median(rounds):.2f} ms")
    print("by the client; median us since the step before, and since the line above")
    before = 0.0
    for offset, what in points:
        verb = "begins" if what.endswith(BEGIN) else "ends"
        name = what.removesuffix(BEGIN).removesuffix(END)
        print(f"{offset:8.0f} {offset - before:+7.0f}  {name}, {verb}")
        before = offset


if __name__ == "__main__":
    main()
