"""`flashduet train score`, which `flashduet eval` runs: τ of given answers, teacher forced."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from drafter_training import cli_options as options
from flashduet.settings import LONGEST_LOOKUP


def score(
    answers: Annotated[
        Path, typer.Option(help='JSON: a list of {"prompt": [ids], "answer": [ids]}.')
    ],
    drafter: Annotated[Path, typer.Option(help="The drafter's folder.")],
    target: options.Target = "default",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    block_length: Annotated[int | None, typer.Option(min=2, show_default=False)] = None,
    lookup: Annotated[
        int, typer.Option(min=0, max=LONGEST_LOOKUP, help="As the draft service is told.")
    ] = 0,
    threads: options.Threads = None,
) -> None:
    """Print JSON: of each answer the tokens committed by each round, `rounds`, and `alone` without
    what is copied from the text."""
    import torch

    from drafter_training.scoring import score_answers
    from drafter_training.shards import Sequence
    from drafter_training.stages import quiet
    from drafter_training.target import target_folder

    with options.reported():
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype: {dtype!r} given, float32 or bfloat16 expected")
        quiet(threads)
        sequences = [
            Sequence([*one["prompt"], *one["answer"]], len(one["prompt"]), True)
            for one in json.loads(answers.read_text())
        ]
        results = score_answers(
            target_folder(target or "default"),
            drafter,
            sequences,
            dtype=getattr(torch, dtype),
            block_length=block_length,
            lookup=lookup,
        )
        typer.echo(json.dumps([asdict(result) for result in results]))
