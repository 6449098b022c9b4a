"""The check itself: every prompt in every mode, and a judgement of each difference."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashduet.client import AsyncClient, Prompt
from flashduet.errors import FlashduetError
from flashduet.models import resolve_model
from flashduet.models_default import shipped_drafter
from flashduet.sampling.params import Sampling
from flashduet_cli.console import note
from flashduet_cli.lossless.modes import (
    BASE,
    BY_OFFICIAL,
    BY_TRANSFORMERS,
    RANDOM_DRAFTER,
    Mode,
    service_modes,
)
from flashduet_cli.lossless.random_drafter import write_random_drafter
from flashduet_cli.lossless.report import Answer, Difference, Report, first_difference
from flashduet_cli.prompt_file import FilePrompt
from flashduet_cli.reach import started
from flashduet_cli.stack_config import StackConfig

if TYPE_CHECKING:
    from flashduet_cli.lossless.reference import Reference

REQUEST_TIMEOUT_S = 1800.0
# Shapes of pass whose error is measured, besides those of the fixed block lengths.
PLAIN_STEP = 1
USUAL_BLOCK = 16

# Called after each answer: mode, prompts done in it.
OnAnswer = Callable[[str, int], None]


@dataclass(frozen=True)
class CheckSettings:
    """What is checked and how."""

    config: StackConfig
    prompts_file: Path
    # Use only the first so many prompts.
    limit: int | None
    dtype: str
    max_tokens: int
    sampling: Sampling
    # Besides the drafter's own.
    block_lengths: Sequence[int]
    random_drafter: bool
    # Also by the official package, in this process; greedy only.
    official: bool
    # Every answer is appended to this file at once.
    partial: Path | None
    verbose: bool

    def modes(self) -> list[Mode]:
        modes = service_modes(self.block_lengths)
        if self.random_drafter:
            modes.append(RANDOM_DRAFTER)
        if self.sampling.greedy:
            modes.append(BY_TRANSFORMERS)
        if self.official:
            modes.append(BY_OFFICIAL)
        return modes

    def describe(self) -> dict[str, object]:
        return {
            "model": self.config.model_reference,
            "dtype": self.dtype,
            "max_tokens": self.max_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "seed": self.sampling.seed,
        }


class Check:
    """Answers every prompt in every mode and keeps the report up to date at every moment."""

    def __init__(
        self,
        settings: CheckSettings,
        model_folder: Path,
        prompts: Sequence[FilePrompt],
        on_answer: OnAnswer,
    ) -> None:
        self._settings = settings
        self._model_folder, self._prompts = model_folder, prompts
        self._on_answer = on_answer
        names = [mode.name for mode in settings.modes()]
        self.report = Report(settings.describe(), len(prompts), names)
        self._reference: Reference | None = None
        self._began = time.monotonic()

    async def run(self) -> Report:
        """Answer everything, then judge the differences."""
        settings = self._settings
        if settings.official:
            # Now, not after all other answers.
            await asyncio.to_thread(self._check_official)
        async with self._client(settings.config) as client:
            await self._services(client, service_modes(settings.block_lengths))
        if settings.random_drafter:
            with tempfile.TemporaryDirectory(prefix="flashduet-") as folder:
                config = replace(settings.config, drafter=self._random_drafter(Path(folder)))
                async with self._client(config) as client:
                    await self._services(client, [RANDOM_DRAFTER])
        if settings.sampling.greedy:
            await self._transformers()
        if settings.official:
            await self._official()
        await self._judge()
        self.report.complete = True
        return self.report

    @asynccontextmanager
    async def _client(self, config: StackConfig) -> AsyncIterator[AsyncClient]:
        async with (
            started(config, verbose=self._settings.verbose, spinner=False) as stack,
            AsyncClient(stack.endpoint) as client,
        ):
            yield client

    async def _services(self, client: AsyncClient, modes: Sequence[Mode]) -> None:
        # Mode within prompt: an interrupted run has compared what it has answered.
        for prompt in self._prompts:
            for mode in modes:
                self._take(mode, prompt, await self._ask(client, mode, prompt))

    async def _ask(self, client: AsyncClient, mode: Mode, prompt: FilePrompt) -> Answer:
        asked: Prompt = prompt.text if mode.as_chat else prompt.token_ids
        generation = await client.generate(
            asked,
            max_tokens=self._settings.max_tokens,
            sampling=self._settings.sampling,
            speculation=mode.speculation,
            block_length=mode.block_length,
            timeout=REQUEST_TIMEOUT_S,
        ).result()
        if generation.usage.prompt_tokens != len(prompt.token_ids):
            raise FlashduetError(
                f"{prompt.id}: the gateway made {generation.usage.prompt_tokens} tokens of the "
                f"prompt, its tokenizer makes {len(prompt.token_ids)} here"
            )
        return Answer.of(generation)

    async def _transformers(self) -> None:
        reference = await self._load_reference()
        for prompt in self._prompts:
            tokens = await asyncio.to_thread(
                reference.greedy, prompt.token_ids, self._settings.max_tokens
            )
            self._take(BY_TRANSFORMERS, prompt, Answer(tuple(tokens)))

    def _check_official(self) -> None:
        from flashduet_cli.lossless.official import drafter_class

        drafter_class(self._drafter_folder())

    async def _official(self) -> None:
        from flashduet_cli.lossless.official import OfficialDFlash

        settings = self._settings
        official = await asyncio.to_thread(
            OfficialDFlash, self._model_folder, self._drafter_folder(), settings.dtype
        )
        for prompt in self._prompts:
            answer = await asyncio.to_thread(official.greedy, prompt.token_ids, settings.max_tokens)
            self._take(BY_OFFICIAL, prompt, answer)

    def _take(self, mode: Mode, prompt: FilePrompt, answer: Answer) -> None:
        answers = self.report.answers.setdefault(mode.name, {})
        answers[prompt.id] = answer
        self.report.seconds = time.monotonic() - self._began
        if self._settings.partial is not None:
            line = {"mode": mode.name, "prompt_id": prompt.id, "token_ids": answer.token_ids}
            with self._settings.partial.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        base = self.report.answers[BASE][prompt.id]
        position = first_difference(base.token_ids, answer.token_ids)
        if position is not None:
            note(f"{prompt.id}: {mode.name} differs at answer token {position}; judged at the end")
        self._on_answer(mode.name, len(answers))

    async def _judge(self) -> None:
        base = self.report.answers[BASE]
        for mode in self.report.modes:
            for prompt in self._prompts:
                ours, theirs = base[prompt.id], self.report.answers[mode][prompt.id]
                position = first_difference(ours.token_ids, theirs.token_ids)
                if position is None:
                    continue
                difference = await self._difference(prompt, mode, position)
                near_tie = difference.judgement.near_tie
                (self.report.near_ties if near_tie else self.report.differences).append(difference)
        self.report.seconds = time.monotonic() - self._began

    async def _difference(self, prompt: FilePrompt, mode: str, position: int) -> Difference:
        from flashduet_cli.lossless.near_tie import Judgement, judge

        ours = self.report.answers[BASE][prompt.id].token_ids
        theirs = self.report.answers[mode][prompt.id].token_ids
        if position >= min(len(ours), len(theirs)):
            # One is a prefix of the other and ended there without a stop token of its own.
            nothing = Judgement(False, "length", float("inf"), 0.0)
            pair = [ids[position] if position < len(ids) else None for ids in (ours, theirs)]
            return Difference(prompt.id, mode, position, pair[0], pair[1], nothing)
        reference = await self._load_reference()
        prefix = [*prompt.token_ids, *ours[:position]]
        lengths = {PLAIN_STEP, USUAL_BLOCK, *self._settings.block_lengths}
        shapes = sorted(length for length in lengths if length <= len(prefix))
        exact = await asyncio.to_thread(reference.exact_logits, prefix)
        passes = [await asyncio.to_thread(reference.logits, prefix, shape) for shape in shapes]
        tokens = (ours[position], theirs[position])
        judgement = judge(exact, passes, tokens, self._settings.sampling, len(prefix))
        return Difference(prompt.id, mode, position, *tokens, judgement)

    async def _load_reference(self) -> Reference:
        if self._reference is None:
            from flashduet_cli.lossless.reference import Reference

            self._reference = await asyncio.to_thread(
                Reference, self._model_folder, self._settings.dtype
            )
        return self._reference

    def _drafter_folder(self) -> Path:
        set_outside = os.environ.get("FLASHDUET_DRAFT_MODEL")
        given = self._settings.config.drafter or set_outside or "default"
        return shipped_drafter() if given == "default" else resolve_model(given)

    def _random_drafter(self, folder: Path) -> str:
        return str(write_random_drafter(self._drafter_folder(), folder / "random-drafter"))
