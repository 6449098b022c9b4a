"""Answers that must not depend on what else is computed at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flashduet.client import GenerateOptions
from flashduet_cli.bench import statistics
from flashduet_cli.bench.figures import Measured
from flashduet_cli.bench.statistics import Estimate
from flashduet_cli.bench.workbench import Running, Workbench
from flashduet_cli.lossless.report import first_difference

_SESSIONS = 32
_BLOCK_LENGTHS = (2, 4, 8, 16)


async def concurrency(bench: Workbench) -> Measured:
    """In float32: answers given 32 at a time, against each alone; near-ties count as equal."""
    running, settings = await bench.stack("exact"), bench.settings
    tokens = settings.count(64, 12)
    prompts = settings.prompts.some(settings.count(_SESSIONS, 6), most_tokens=256)
    alone = [await _answer(running, prompt, tokens) for prompt in prompts]
    together = await _together(running, prompts, tokens)
    judged = []
    for prompt, base, other in zip(prompts, alone, together, strict=True):
        position = first_difference(base, other)
        if position is not None:
            judged.append(await _judge(bench, prompt, base, other, position))
    wrong = sum(not each["near_tie"] for each in judged)
    return Measured(
        Estimate((len(prompts) - wrong) / len(prompts)),
        details={"answers": len(prompts), "tokens_each": tokens, "differences": judged},
    )


async def invariant(bench: Workbench) -> Measured:
    """With batch-invariant numerics: answers across block lengths and concurrency, all equal."""
    running, settings = await bench.stack("invariant"), bench.settings
    tokens = settings.count(64, 12)
    prompts = settings.prompts.some(settings.count(16, 3), most_tokens=256)
    base = [await _answer(running, prompt, tokens, speculation="off") for prompt in prompts]
    ways: dict[str, list[list[int]]] = {
        f"block {length}": [
            await _answer(running, prompt, tokens, block_length=length) for prompt in prompts
        ]
        for length in (_BLOCK_LENGTHS if not settings.quick else _BLOCK_LENGTHS[-1:])
    }
    for mode in ("off", "fixed"):
        ways[f"all at once, {mode}"] = await _together(running, prompts, tokens, speculation=mode)
    equal = {
        way: sum(ours == theirs for ours, theirs in zip(answers, base, strict=True))
        for way, answers in ways.items()
    }
    share = sum(equal.values()) / (len(prompts) * len(ways))
    return Measured(
        Estimate(share),
        details={"answers": len(prompts), "tokens_each": tokens, "equal": equal},
    )


async def invariant_cost(bench: Workbench) -> Measured:
    """How much slower one session is with batch-invariant numerics, drafted."""
    fast, invariant_stack = await bench.stack("fast"), await bench.stack("invariant")
    settings = bench.settings
    tokens = settings.count(96, 16)
    prompts = settings.prompts.some(settings.count(12, 2), most_tokens=256)
    details: dict[str, object] = {}
    shares: list[float] = []
    for mode in ("off", "fixed"):
        costs = []
        for prompt in prompts:
            speeds = []
            for running in (fast, invariant_stack):
                answer = await running.ask(
                    prompt, max_tokens=tokens, speculation=mode, drafter_only=True
                )
                spent = answer.seconds - answer.first_token_seconds
                # By the step, since other roundings may give other answers.
                steps = answer.speculation.rounds
                speeds.append(steps / spent)
            costs.append(1 - speeds[1] / speeds[0])
        details[f"slower a round, drafting {mode}"] = costs
        shares += costs
    return Measured(statistics.mean(shares), shares, details)


async def _answer(
    running: Running,
    prompt: Sequence[int],
    tokens: int,
    **options: object,
) -> list[int]:
    asked: GenerateOptions = {"max_tokens": tokens}
    asked.update(options)  # type: ignore[typeddict-item]
    return (await running.ask(prompt, **asked)).token_ids


async def _together(
    running: Running, prompts: Sequence[list[int]], tokens: int, **options: object
) -> list[list[int]]:
    return list(
        await asyncio.gather(*(_answer(running, prompt, tokens, **options) for prompt in prompts))
    )


async def _judge(
    bench: Workbench, prompt: list[int], base: list[int], other: list[int], position: int
) -> dict[str, object]:
    """Whether both tokens at the first difference are within rounding of the best."""
    found: dict[str, object] = {"position": position, "near_tie": False}
    if position >= min(len(base), len(other)):
        return found
    # Loading a reference takes seconds and memory; it is seldom needed.
    from flashduet.sampling.params import Sampling
    from flashduet_cli.lossless.near_tie import judge
    from flashduet_cli.lossless.reference import Reference

    reference = await asyncio.to_thread(Reference, bench.settings.folder, "float32")
    prefix = [*prompt, *base[:position]]
    exact = await asyncio.to_thread(reference.exact_logits, prefix)
    passes = [await asyncio.to_thread(reference.logits, prefix, rows) for rows in (1, 16)]
    tokens = (base[position], other[position])
    judgement = judge(exact, passes, tokens, Sampling(), len(prefix))
    return found | {
        "near_tie": judgement.near_tie,
        "tokens": tokens,
        "gap": judgement.gap,
        "bound": judgement.bound,
    }
