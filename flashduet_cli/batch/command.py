"""The command over a file: what is left to do, the run, and what it came to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import typer

from flashduet.client import AsyncClient, GenerateOptions
from flashduet_cli.batch.answers import AnswerFile
from flashduet_cli.batch.progress import BatchProgress
from flashduet_cli.batch.prompts import BatchPrompt, read_prompts
from flashduet_cli.batch.run import Batch
from flashduet_cli.console import fail, note, print_json
from flashduet_cli.reach import Where, reached

# With more answers at a time each step is full of them, and drafts would only take their room.
DRAFTED_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Where prompts come from and answers go, and how many are asked for at once."""

    prompts: Path
    answers: Path
    concurrency: int


async def answer_file(
    files: BatchFiles, options: GenerateOptions, system: str | None, where: Where, as_json: bool
) -> None:
    """Answer every prompt of a file that is not answered yet; exit status 1 where some failed.

    Raises:
        FlashduetError: a file is not what it should be, or nobody answers.
    """
    prompts = read_prompts(files.prompts)
    if options.get("raw", False):
        _refuse_chats(prompts)
    with AnswerFile(files.answers) as answers:
        left = [prompt for prompt in prompts if prompt.id not in answers.done]
        already = len(prompts) - len(left)
        if already:
            note(f"{already} of {len(prompts)} prompts are answered in {files.answers} already")
        if not left:
            return
        async with reached(where) as (endpoint, model), AsyncClient(endpoint) as client:
            asked: GenerateOptions = {**options, "model": model, "priority": "batch"}
            with BatchProgress(len(prompts), already) as progress:
                batch = Batch(client, answers, asked, system, progress)
                totals = await batch.run(left, files.concurrency)
    if as_json:
        print_json(
            {
                "answered": totals.answered,
                "failed": totals.failed,
                "already": already,
                "tokens": totals.tokens,
                "seconds": progress.seconds,
                "tokens_per_second": totals.tokens / progress.seconds,
            }
        )
    note(
        f"{totals.answered} prompts answered, {totals.tokens} tokens in {progress.seconds:.1f} s "
        f"({totals.tokens / progress.seconds:.1f} tokens/s)"
    )
    if totals.failed:
        fail(
            f"{totals.failed} of {len(left)} prompts failed; their lines in {files.answers} say "
            "why, and the same command tries them again"
        )


def environment(concurrency: int) -> dict[str, str]:
    """Room for so many sessions in a stack of one's own, where no variable says otherwise."""
    wanted = {
        "FLASHDUET_TARGET_MAX_SESSIONS": str(concurrency),
        "FLASHDUET_DRAFT_MAX_SESSIONS": str(concurrency),
        "FLASHDUET_GATEWAY_MAX_REQUESTS": str(concurrency),
        # Nobody else asks this stack, so nothing is kept free for them.
        "FLASHDUET_GATEWAY_MAX_BATCH_REQUESTS": str(concurrency),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _refuse_chats(prompts: list[BatchPrompt]) -> None:
    for prompt in prompts:
        if prompt.messages or len(prompt.turns) > 1:
            fail(f"--raw takes prompts as they are; {prompt.id!r} is a conversation", 2)


def refuse_mixed(prompt: str | None, file: Path | None, out: Path | None) -> None:
    """End the command where it was given a prompt and a file, or one file without the other."""
    if file is not None and prompt is not None:
        fail("give either a prompt or --file", 2)
    if (file is None) != (out is None):
        fail("--file and --out belong together", 2)
    if out is not None and out.is_dir():
        raise typer.BadParameter(f"{out} is a folder", param_hint="--out")
