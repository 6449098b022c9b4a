"""Sessions that share work, wait for each other, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from flashduet.client import AsyncGenerationStream
from flashduet.errors import FlashduetError
from flashduet.sampling.params import Sampling
from flashduet_cli.bench import statistics
from flashduet_cli.bench.figures import Measured
from flashduet_cli.bench.statistics import Estimate
from flashduet_cli.bench.workbench import REQUEST_TIMEOUT_S, Running, Workbench

_PREFIX, _SUFFIX, _REQUESTS = 1000, 16, 16
_LONG_PROMPT = 4000
# Closing sessions are freed within this time, or they are left over.
_SETTLE_S = 10.0


async def prefix_after(bench: Workbench) -> Measured:
    """Prefill work of 15 requests after a first one with the same prefix, against all of it."""
    return await _prefix(bench, at_once=False)


async def prefix_at_once(bench: Workbench) -> Measured:
    """Prefill work of 16 requests with a common prefix that arrive together."""
    return await _prefix(bench, at_once=True)


async def _prefix(bench: Workbench, *, at_once: bool) -> Measured:
    running, settings = await bench.stack("fast"), bench.settings
    shares, times, without = [], [], []
    for number in range(settings.count(4, 1)):
        prefix = settings.prompts.text(_PREFIX, first=17 * number)
        # Texts would begin alike, by the chat template.
        source = random.Random(number)
        prompts = [prefix + source.choices(prefix, k=_SUFFIX) for _ in range(_REQUESTS)]
        salt = secrets.token_hex(8)
        if not at_once:
            await _prefill(running, prompts[:1], [salt])
            prompts = prompts[1:]
        before = await running.target_load()
        times.append(await _prefill(running, prompts, [salt] * len(prompts)))
        after = await running.target_load()
        asked = after.prompt_tokens - before.prompt_tokens
        found = after.cached_prompt_tokens - before.cached_prompt_tokens
        shares.append((asked - found) / asked)
        salts = [secrets.token_hex(8) for _ in prompts]
        without.append(await _prefill(running, prompts, salts))
    return Measured(
        statistics.mean(shares),
        shares,
        {
            "seconds": times,
            "seconds without reuse": without,
            "time ratio": [a / b for a, b in zip(times, without, strict=True)],
        },
    )


async def _prefill(running: Running, prompts: Sequence[list[int]], salts: Sequence[str]) -> float:
    """Seconds until all of them have their first token."""
    started = time.perf_counter()
    await asyncio.gather(
        *(
            running.ask(prompt, max_tokens=2, cache_salt=salt)
            for prompt, salt in zip(prompts, salts, strict=True)
        )
    )
    return time.perf_counter() - started


async def token_gaps(bench: Workbench) -> Measured:
    """Time between a running session's tokens while a long prompt is computed, against alone."""
    running, settings = await bench.stack("fast"), bench.settings
    long = settings.prompts.text(settings.count(_LONG_PROMPT, 1000))
    alone: list[float] = []
    beside: list[float] = []
    prefills = []
    for number in range(settings.count(4, 1)):
        prompt = settings.prompts.text(64, first=number)
        stream = running.client.generate(
            prompt,
            max_tokens=4096,
            sampling=Sampling(),
            ignore_eos=True,
            speculation="off",
            timeout=REQUEST_TIMEOUT_S,
        )
        async with stream:
            gaps = _Gaps(stream)
            reading = asyncio.create_task(gaps.read())
            await gaps.collect(settings.count(150, 30))
            alone += gaps.take()
            started = time.perf_counter()
            await running.ask(long, max_tokens=1, speculation="off")
            prefills.append(time.perf_counter() - started)
            beside += gaps.take()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    estimate = statistics.bootstrap(
        [beside, alone],
        lambda during, before: (
            statistics.percentile(during, 99) / statistics.percentile(before, 99)
        ),
    )
    return Measured(
        estimate,
        details={
            "alone p50, p99 ms": _spread(alone),
            "beside p50, p99 ms": _spread(beside),
            "largest beside ms": round(max(beside) * 1e3, 2),
            "gaps": [len(alone), len(beside)],
            "prefill seconds": prefills,
            "long prompt tokens": len(long),
        },
    )


class _Gaps:
    """Seconds between the tokens of one answer that is being read."""

    def __init__(self, stream: AsyncGenerationStream) -> None:
        self._stream = stream
        self._gaps: list[float] = []
        self._more = asyncio.Event()

    async def read(self) -> None:
        last = None
        async for chunk in self._stream:
            if chunk.token_ids:
                now = time.perf_counter()
                if last is not None:
                    self._gaps.append(now - last)
                    self._more.set()
                last = now

    async def collect(self, count: int) -> None:
        """Wait until there are so many."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            while len(self._gaps) < count:
                self._more.clear()
                await self._more.wait()

    def take(self) -> list[float]:
        """Those since the last call; the first ones of an answer are left out with it."""
        taken, self._gaps = self._gaps, []
        return taken


def _spread(gaps: list[float]) -> list[float]:
    return [round(statistics.percentile(gaps, percent) * 1e3, 2) for percent in (50, 99)]


async def leftovers(bench: Workbench) -> Measured:
    """What is still held after 2,000 random requests, many of them cancelled at any moment."""
    running, settings = await bench.stack("fast"), bench.settings
    count = settings.count(2000, 60)
    source = random.Random(7)
    at_once = asyncio.Semaphore(32)
    ends = {"answered": 0, "cancelled": 0, "refused": 0}

    async def one(number: int) -> None:
        async with at_once:
            prompt = settings.prompts.text(source.randint(1, 60), first=number)
            stream = running.client.generate(
                prompt,
                max_tokens=source.randint(1, 12),
                temperature=source.choice([0.0, 0.8]),
                presence_penalty=source.choice([0.0, 0.0, 0.5]),
                top_logprobs=source.choice([None, None, 3]),
                speculation=source.choice(["auto", "fixed", "off"]),
                timeout=REQUEST_TIMEOUT_S,
            )
            limit = source.expovariate(4.0) if source.random() < 0.4 else None
            try:
                async with asyncio.timeout(limit):
                    await stream.result()
                ends["answered"] += 1
            except TimeoutError:
                stream.cancel()
                ends["cancelled"] += 1
            except FlashduetError:
                ends["refused"] += 1

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    seconds = time.perf_counter() - started
    left = await _left(running)
    deadline = time.monotonic() + _SETTLE_S
    while any(left.values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        with suppress(FlashduetError):
            left = await _left(running)
    details = {"requests": count, "seconds": round(seconds, 1), **ends, **left}
    return Measured(Estimate(float(sum(left.values()))), details=details)


async def _left(running: Running) -> dict[str, int]:
    target, draft = await running.target_load(), await running.draft_load()
    gateway = await running.client.load()
    left = {
        "target sessions": target.sessions,
        "target KV blocks": target.kv_blocks - target.free_kv_blocks,
        "queued items": target.queued_items,
        "ring records": target.ring_records,
        "gateway requests": gateway.active_requests,
    }
    if draft is not None:
        left["draft sessions"] = draft.sessions
        left["draft context blocks"] = draft.context_blocks - draft.free_context_blocks
        left["queued proposals"] = draft.queued_proposals
    return left


async def start(bench: Workbench) -> Measured:
    """Seconds from the start of all three services to a stack that drafts, files cached."""
    for _ in range(bench.settings.count(3, 1)):
        await bench.close("fast")
        await bench.stack("fast")
    # The first one may have found cold caches.
    samples = bench.starts[-bench.settings.count(3, 1) :]
    return Measured(statistics.mean(samples), samples, {"all starts": list(bench.starts)})


async def transport(bench: Workbench) -> Measured:
    """Bytes a second from one process's tensor to another's, against a plain copy."""
    settings = bench.settings
    facts = await bench.drafter_facts()
    width = int(facts["feature_bytes"]) // 2
    probe = await bench.transport()
    rows, chunk_rows = 2048, 512
    await probe.ask("start", rows=rows, width=width, chunk_rows=chunk_rows)
    repeats = settings.count(30, 5)
    ratios, copies, sends = [], [], []
    copied, awake = [], []
    try:
        for _ in range(settings.count(8, 2)):
            copy = statistics.percentile(await probe.ask("memcpy", repeats=repeats), 50)
            # As the services do it: every descriptor has to wake the reader.
            asleep = await probe.ask("send", repeats=repeats, awake=False)
            send = statistics.percentile(asleep, 50)
            copies.append(copy)
            sends.append(send)
            # What it costs a draft that has as much of the ring lent as it may.
            without = await probe.ask("send", repeats=repeats, lend=False, awake=False)
            copied.append(statistics.percentile(without, 50))
            # And what it would without sleeping.
            waiting = await probe.ask("send", repeats=repeats)
            awake.append(statistics.percentile(waiting, 50))
            ratios.append(copy / send)
    finally:
        await probe.ask("stop")
        await bench.close("transport")
    return Measured(
        statistics.ratio(ratios),
        ratios,
        {
            "bytes": rows * width * 2,
            "chunk rows": chunk_rows,
            "memcpy ms": [round(value * 1e3, 4) for value in copies],
            "memfd ms": [round(value * 1e3, 4) for value in sends],
            "memfd ms, copied out": [round(value * 1e3, 4) for value in copied],
            "memfd ms, reader awake": [round(value * 1e3, 4) for value in awake],
        },
    )
