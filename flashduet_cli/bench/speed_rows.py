"""Tokens a second through the gateway, beside Transformers and beside itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from flashduet.client import SpeculationMode
from flashduet_cli.bench import statistics
from flashduet_cli.bench.figures import Measured
from flashduet_cli.bench.probe import Probe
from flashduet_cli.bench.workbench import Running, Workbench

_SESSIONS = 32
_BATCH = 64


async def plain_speed(bench: Workbench) -> Measured:
    """One session without drafting, against `generate` on the same prompt."""
    running, peer = await bench.stack("fast"), await bench.transformers()
    settings = bench.settings
    tokens = settings.count(96, 16)
    prompts = settings.prompts.some(settings.count(12, 3), most_tokens=256)
    await _one(running, prompts[0], tokens)
    ours, theirs = [], []
    for prompt in prompts:
        ours.append(await _one(running, prompt, tokens))
        theirs.append(await _peer(peer, [prompt], tokens))
    return _of_pairs(ours, theirs, "flashduet", "transformers")


async def sessions(bench: Workbench) -> Measured:
    """32 sessions at once without drafting, against one."""
    running, settings = await bench.stack("fast"), bench.settings
    tokens = settings.count(96, 16)
    prompts = settings.prompts.some(_SESSIONS, most_tokens=256)
    await _many(running, prompts, tokens)
    many, one = [], []
    for index in range(settings.count(6, 2)):
        one.append(await _one(running, prompts[index], tokens))
        many.append(await _many(running, prompts, tokens))
    return _of_pairs(many, one, f"{_SESSIONS} sessions", "1 session")


async def batch(bench: Workbench) -> Measured:
    """64 prompts at once, of batch priority, against `generate` on them as one batch."""
    running, peer = await bench.stack("fast"), await bench.transformers()
    settings = bench.settings
    tokens = settings.count(64, 8)
    prompts = settings.prompts.some(settings.count(_BATCH, 8), most_tokens=256)
    await _many(running, prompts[:8], 4)
    ours, theirs = [], []
    for _ in range(settings.count(4, 1)):
        ours.append(await _many(running, prompts, tokens, batch=True))
        theirs.append(await _peer(peer, prompts, tokens))
    return _of_pairs(ours, theirs, "flashduet", "transformers")


async def first_token(bench: Workbench) -> Measured:
    """Time to the first token with drafting, against the same prompt's without."""
    running, settings = await bench.stack("fast"), bench.settings
    prompts = settings.prompts.some(settings.count(40, 4))
    await running.ask(prompts[0], max_tokens=8, speculation="fixed")
    on: list[float] = []
    off: list[float] = []
    ways: tuple[tuple[SpeculationMode, list[float]], ...] = (("fixed", on), ("off", off))
    for prompt in prompts:
        for mode, seconds in ways:
            # A few tokens, so that the session is one that drafts.
            answer = await running.ask(prompt, max_tokens=4, speculation=mode)
            seconds.append(answer.first_token_seconds)
    return _of_pairs(on, off, "seconds, drafting on", "seconds, off")


async def _one(running: Running, prompt: Sequence[int], tokens: int) -> float:
    """Tokens a second of one answer without drafting, prefill included."""
    answer = await running.ask(prompt, max_tokens=tokens, speculation="off")
    return answer.tokens_per_second


async def _many(
    running: Running, prompts: Sequence[list[int]], tokens: int, *, batch: bool = False
) -> float:
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            running.ask(
                prompt,
                max_tokens=tokens,
                speculation="off",
                priority="batch" if batch else None,
            )
            for prompt in prompts
        )
    )
    seconds = time.perf_counter() - started
    return sum(answer.usage.completion_tokens for answer in answers) / seconds


async def _peer(peer: Probe, prompts: Sequence[list[int]], tokens: int) -> float:
    answer = await peer.ask("generate", prompts=prompts, max_tokens=tokens)
    # Its threads spin for a moment after their last work.
    await asyncio.sleep(0.2)
    return float(answer["tokens"] / answer["seconds"])


def _of_pairs(above: list[float], below: list[float], upper: str, lower: str) -> Measured:
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return Measured(statistics.ratio(ratios), ratios, {upper: above, lower: below})
