"""`flashduet train data`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from drafter_training import cli_options as options


def data(
    target: options.Target = "default",
    preset: options.PresetName = "default",
    out: options.Out = None,
    folder: Annotated[
        str, typer.Option(help="Folder of the shards, inside --out or absolute.")
    ] = "data",
    prompts: options.Prompts = None,
    file_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of prompts from files.", show_default=False)
    ] = None,
    answer_tokens: options.AnswerTokens = None,
    minutes: Annotated[float, typer.Option(min=0, help="End after so long.")] = float("inf"),
    passages_from: Annotated[
        Path | None,
        typer.Option(
            help="Make long prompts of this folder's answers (the long-context stage).",
            show_default=False,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=64, help="Tokens of prompt and answer at most.", show_default=False),
    ] = None,
    max_answer_tokens: Annotated[
        int | None, typer.Option(min=8, help="Of one answer.", show_default=False)
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded at once.", show_default=False)
    ] = None,
    keep_features: Annotated[
        bool,
        typer.Option(help="Keep the features seen on the way (some KiB a token, bounded)."),
    ] = True,
    cache_gib: options.CacheGib = None,
    threads: options.Threads = None,
    seed: options.Seed = 0,
) -> None:
    """Let the target answer prompts, its own and those of files; resumed if the folder exists.

    A folder goes with one set of settings; whole shards in it are kept, broken ones made again.
    """
    from drafter_training.stages import generate, open_workspace

    with options.reported():
        workspace = open_workspace(target or "default", preset, out, threads)
        given = workspace.preset
        changes: dict[str, Any] = {
            "file_share": file_share,
            "max_length": max_length,
            "max_answer_tokens": max_answer_tokens,
        }
        settings = replace(given.data, **{k: v for k, v in changes.items() if v is not None})
        room = given.cache_gib if cache_gib is None else cache_gib
        workspace.preset = replace(given, data=settings, slots=slots or given.slots, cache_gib=room)
        generate(
            workspace,
            workspace.root / folder,
            prompts=prompts or [],
            answer_tokens=answer_tokens or given.answer_tokens,
            seconds=60 * minutes,
            keep_features=keep_features,
            seed=seed,
            passages_from=passages_from,
        )
