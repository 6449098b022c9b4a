"""Keeps the engine full: many prompts at once, each answered, failed or tried again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from flashduet.client import AsyncClient, GenerateOptions, Generation, Message, Prompt
from flashduet.errors import FlashduetError, Overloaded, Unavailable
from flashduet_cli.batch.answers import AnswerFile
from flashduet_cli.batch.prompts import BatchPrompt

# How long a prompt is tried again while no gateway or target answers, e.g. while one restarts.
_PATIENCE_S = 60.0
_SYNC_S = 1.0


class OnProgress(Protocol):
    """Told of what happens; neither call may wait."""

    def tokens(self, count: int) -> None:
        """So many more tokens have come."""
        ...

    def done(self, *, failed: bool, tokens: int) -> None:
        """One more prompt is over; its answers have so many tokens."""
        ...


@dataclass(slots=True)
class BatchTotals:
    """What a run did."""

    answered: int = 0
    failed: int = 0
    tokens: int = 0


class Batch:
    """One run over the prompts that are not done yet."""

    def __init__(
        self,
        client: AsyncClient,
        answers: AnswerFile,
        options: GenerateOptions,
        system: str | None,
        progress: OnProgress,
    ) -> None:
        """
        Args:
            client: of the gateway that answers.
            answers: gets a line for each prompt.
            options: of every request.
            system: a system message before every conversation, if one was given.
            progress: told of everything.
        """
        self.totals = BatchTotals()
        self._client = client
        self._answers = answers
        self._options = options
        self._system = [Message("system", system)] if system is not None else []
        self._progress = progress
        # A request that found no room waits for the end of another one.
        self._ended = asyncio.Condition()

    async def run(self, prompts: Sequence[BatchPrompt], concurrency: int) -> BatchTotals:
        """Answer them all, at most `concurrency` at a time.

        Raises:
            ConfigurationError: answers cannot be written any more.
            Unavailable: nobody answers any more.
        """
        waiting = iter(prompts)
        syncing = asyncio.create_task(self._sync(), name="sync")
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(concurrency, len(prompts))):
                    tasks.create_task(self._work(waiting), name="batch")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            syncing.cancel()
            await asyncio.wait((syncing,))
        return self.totals

    async def _work(self, waiting: Iterator[BatchPrompt]) -> None:
        for prompt in waiting:
            started_at = time.monotonic()
            try:
                generations = await self._converse(prompt)
            except Unavailable:
                raise
            except FlashduetError as error:
                self.totals.failed += 1
                failure = {"type": type(error).__name__, "message": error.message}
                self._answers.write({"id": prompt.id, "error": failure})
                self._progress.done(failed=True, tokens=0)
                continue
            self.totals.answered += 1
            seconds = round(time.monotonic() - started_at, 3)
            answers = [_line(generation) for generation in generations]
            self._answers.write({"id": prompt.id, "answers": answers, "seconds": seconds})
            tokens = sum(generation.usage.completion_tokens for generation in generations)
            self.totals.tokens += tokens
            self._progress.done(failed=False, tokens=tokens)

    async def _converse(self, prompt: BatchPrompt) -> list[Generation]:
        """The answers to a prompt, one a turn."""
        if self._options.get("raw", False):
            return [await self._ask(turn) for turn in prompt.turns]
        said = [*self._system, *prompt.messages]
        if not prompt.turns:
            return [await self._ask(said)]
        answers = []
        for turn in prompt.turns:
            said.append(Message("user", turn))
            generation = await self._ask(said)
            said.append(Message("assistant", generation.text))
            answers.append(generation)
        return answers

    async def _ask(self, prompt: Prompt) -> Generation:
        """One answer, however often it takes to find room for it."""
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self._try(prompt)
            except Overloaded as error:
                await self._room(error.retry_after_s or 1.0)
                give_up_at = time.monotonic() + _PATIENCE_S
            except Unavailable as error:
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(error.retry_after_s or 1.0)

    async def _try(self, prompt: Prompt) -> Generation:
        async with self._client.generate(prompt, **self._options) as stream:
            async for chunk in stream:
                self._progress.tokens(len(chunk.token_ids))
            generation = await stream.result()
        async with self._ended:
            self._ended.notify()
        return generation

    async def _room(self, longest_s: float) -> None:
        """Until another request of ours has ended; others' requests may hold the room too."""
        async with self._ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), longest_s)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            await asyncio.to_thread(self._answers.sync)


def _line(generation: Generation) -> dict[str, object]:
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.usage.prompt_tokens,
        "cached_tokens": generation.usage.cached_tokens,
        "rounds": generation.speculation.rounds,
        "acceptance_length": round(generation.speculation.acceptance_length, 4),
        "seed": str(generation.seed),
    }
