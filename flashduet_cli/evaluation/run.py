"""The evaluation itself: every prompt answered through the services, at each temperature."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flashduet.client import AsyncClient
from flashduet.errors import FlashduetError
from flashduet.models import resolve_model
from flashduet.models_default import shipped_drafter
from flashduet.sampling.params import Sampling
from flashduet_cli.evaluation.figures import Answered, by_category, figures, tau_of
from flashduet_cli.evaluation.lookup import lookup_rounds
from flashduet_cli.evaluation.loops import loops
from flashduet_cli.prompt_file import FilePrompt
from flashduet_cli.reach import started
from flashduet_cli.stack_config import StackConfig

REQUEST_TIMEOUT_S = 1800.0

# Acceptance is measured, not speed: a draft on a busy machine is waited for.
PATIENT = {
    "FLASHDUET_GATEWAY_DRAFT_BUDGET_FLOOR_MS": "20000",
    "FLASHDUET_GATEWAY_DRAFT_BUDGET_CEILING_MS": "20000",
}

# Called after each answer.
OnAnswer = Callable[[str], None]


@dataclass(frozen=True)
class EvalSettings:
    """What is measured and how. block_length: anchor and drafts; None: as trained.

    lookup: tokens that must repeat to be copied; 0: the drafter alone.
    teacher_forced: also score the greedy answers without the services.
    """

    config: StackConfig
    model_folder: Path
    dtype: str
    max_tokens: int
    temperatures: Sequence[float]
    seed: int
    block_length: int | None
    lookup: int
    concurrency: int
    teacher_forced: bool
    verbose: bool

    def describe(self) -> dict[str, object]:
        return {
            "model": self.config.model_reference,
            "dtype": self.dtype,
            "max_tokens": self.max_tokens,
            "temperatures": list(self.temperatures),
            "seed": self.seed,
            "lookup": self.lookup,
        }


class Evaluation:
    """Answers every prompt at every temperature."""

    def __init__(
        self, settings: EvalSettings, prompts: Sequence[FilePrompt], on_answer: OnAnswer
    ) -> None:
        self._settings, self._prompts, self._on_answer = settings, prompts, on_answer
        self.answers: dict[float, list[Answered]] = {}
        self._block_length = 0
        self._drafter = ""

    async def run(self) -> dict[str, object]:
        """Everything measured, ready for JSON."""
        settings = self._settings
        lookup = {"FLASHDUET_DRAFT_LOOKUP": str(settings.lookup)}
        config = replace(settings.config, env={**PATIENT, **settings.config.env, **lookup})
        async with (
            started(config, verbose=settings.verbose, spinner=False) as stack,
            AsyncClient(stack.endpoint) as client,
        ):
            await self._look(client)
            for temperature in settings.temperatures:
                self.answers[temperature] = await self._answer_all(client, temperature)
        report: dict[str, object] = settings.describe() | {
            "drafter": self._drafter,
            "block_length": self._block_length,
            "prompts": len(self._prompts),
        }
        for temperature, answers in self.answers.items():
            name = "greedy" if temperature == 0 else f"temperature_{temperature:g}"
            found = figures(answers, self._block_length - 1)
            found["prompt_lookup"] = self._lookup(answers)
            if temperature == 0 and settings.teacher_forced:
                found["teacher_forced"] = await self._teacher_forced(answers)
            report[name] = found
        return report

    async def _look(self, client: AsyncClient) -> None:
        cards = await client.models()
        if not cards or not cards[0].drafter:
            raise FlashduetError("the gateway has no drafter to evaluate; --verbose shows the logs")
        self._drafter = cards[0].drafter
        self._block_length = self._settings.block_length or cards[0].block_length

    async def _answer_all(self, client: AsyncClient, temperature: float) -> list[Answered]:
        room = asyncio.Semaphore(self._settings.concurrency)

        async def one(prompt: FilePrompt) -> Answered:
            async with room:
                answered = await self._ask(client, prompt, temperature)
                self._on_answer(f"T={temperature:g}")
                return answered

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in self._prompts]
        return [task.result() for task in tasks]

    async def _ask(self, client: AsyncClient, prompt: FilePrompt, temperature: float) -> Answered:
        stream = client.generate(
            prompt.token_ids,
            max_tokens=self._settings.max_tokens,
            sampling=Sampling(temperature=temperature, seed=self._settings.seed),
            speculation="fixed",
            block_length=self._block_length,
            timeout=REQUEST_TIMEOUT_S,
        )
        # A chunk is a round; the first is the prefill's token.
        sizes = [len(chunk.token_ids) async for chunk in stream if chunk.token_ids]
        generation = await stream.result()
        report = generation.speculation
        if len(sizes) - 1 != report.rounds:
            raise FlashduetError(
                f"{prompt.id}: {len(sizes) - 1} chunks came for {report.rounds} rounds"
            )
        return Answered(
            prompt_id=prompt.id,
            category=prompt.category,
            prompt=prompt.token_ids,
            token_ids=tuple(generation.token_ids),
            rounds=tuple(sizes[1:]),
            undrafted=report.undrafted_rounds,
            seconds=generation.seconds,
        )

    def _lookup(self, answers: Sequence[Answered]) -> dict[str, object]:
        """What prompt lookup would accept of the same answers."""
        looked = [
            replace(
                answer,
                rounds=tuple(lookup_rounds(answer.prompt, answer.token_ids, self._block_length)),
            )
            for answer in answers
        ]
        steady = [answer for answer in looked if not loops(answer.token_ids)]
        return {
            "overall": tau_of(answer.rounds for answer in looked).tau,
            "without_loops": tau_of(answer.rounds for answer in steady).tau,
            "by_category": {name: tau.tau for name, tau in by_category(looked).items()},
        }

    async def _teacher_forced(self, answers: Sequence[Answered]) -> dict[str, object]:
        """The same answers walked without the services, in a process of its own."""
        walked = [answer for answer in answers if len(answer.token_ids) > 1]
        given = self._settings.config.drafter or os.environ.get("FLASHDUET_DRAFT_MODEL", "default")
        drafter = shipped_drafter() if given == "default" else resolve_model(given)
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="flashduet-") as file:
            json.dump([{"prompt": a.prompt, "answer": a.token_ids} for a in walked], file)
            file.flush()
            command = [sys.executable, "-m", "drafter_training", "score"]
            command += ["--answers", file.name, "--drafter", str(drafter)]
            command += ["--target", str(self._settings.model_folder)]
            command += ["--dtype", self._settings.dtype]
            command += ["--block-length", str(self._block_length)]
            command += ["--lookup", str(self._settings.lookup)]
            if self._settings.config.threads:
                command += ["--threads", str(self._settings.config.threads)]
            output = await _output(command)
        scored = list(zip(walked, json.loads(output), strict=True))
        return {
            "overall": tau_of(found["rounds"] for _, found in scored).tau,
            "answers_with_other_rounds": sum(
                list(answer.rounds) != found["rounds"] for answer, found in scored
            ),
            "drafter_alone": tau_of(found["alone"] for _, found in scored).tau,
            "drafter_alone_without_loops": tau_of(
                found["alone"] for answer, found in scored if not loops(answer.token_ids)
            ).tau,
        }


async def _output(command: Sequence[str]) -> bytes:
    """Standard output of a child, which ends with us."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise FlashduetError(f"scoring without the services failed: {last}")
    return output
