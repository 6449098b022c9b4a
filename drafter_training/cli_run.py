"""`flashduet train run`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from drafter_training import cli_options as options


def run(
    data: options.Data,
    target: options.Target = "default",
    preset: options.PresetName = "default",
    out: options.Out = None,
    name: Annotated[str, typer.Option(help="Folder of the run, inside --out.")] = "run",
    resume: options.Resume = False,
    init_from: options.InitFrom = None,
    epochs: Annotated[float | None, typer.Option(min=0.01, show_default=False)] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Cosine by the clock; not repeatable.", show_default=False),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0, show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences a pass.", show_default=False)
    ] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Passes a step.")] = 1,
    anchors: Annotated[
        int | None, typer.Option(min=1, help="Blocks a sequence.", show_default=False)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Of the drafter.", show_default=False)
    ] = None,
    features: Annotated[
        int | None, typer.Option(min=1, help="Tapped target layers.", show_default=False)
    ] = None,
    block_length: Annotated[
        int | None, typer.Option(min=2, help="Anchor and masks.", show_default=False)
    ] = None,
    short_blocks: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of passes over blocks half as long.", show_default=False
        ),
    ] = None,
    selector_rank: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of a candidate selector (DFlash 2); 0: none.", show_default=False
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(min=0, help="Default: a spare one.", show_default=False)
    ] = None,
    weighting: Annotated[
        str | None, typer.Option(help="Of slots: decay, dpace or flat.", show_default=False)
    ] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Of decay; about half the block.", show_default=False)
    ] = None,
    distillation: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of the target's distribution.", show_default=False),
    ] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option(min=0, help="Between checkpoints.", show_default=False)
    ] = None,
    cache_gib: options.CacheGib = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
) -> None:
    """Train on folders of shards. Several GPUs: `accelerate launch -m drafter_training run ...`.

    Options left out are the preset's.
    """
    from drafter_training.loss import Weighting
    from drafter_training.run_command import RunCommand
    from drafter_training.stages import follow, open_workspace

    def chosen(**changes: Any) -> dict[str, Any]:
        return {key: value for key, value in changes.items() if value is not None}

    if weighting not in (None, *Weighting.__args__):  # type: ignore[attr-defined]
        options.fail(f"--weighting: {weighting!r} given, decay, dpace or flat expected", 2)
    with options.reported():
        workspace = open_workspace(target or "default", preset, out, threads)
        given = workspace.preset
        shape = chosen(
            layers=layers,
            features=features,
            block_length=block_length,
            mask_token_id=mask_token_id,
            selector_rank=selector_rank,
        )
        loss = chosen(weighting=weighting, gamma=gamma, distillation=distillation)
        workspace.preset = replace(
            given,
            shape=replace(given.shape, **shape),
            loss=replace(given.loss, **loss),
            anchors=anchors or given.anchors,
            short_blocks=given.short_blocks if short_blocks is None else short_blocks,
            cache_gib=given.cache_gib if cache_gib is None else cache_gib,
        )
        settings = chosen(
            epochs=epochs,
            minutes=minutes,
            learning_rate=learning_rate,
            batch_size=batch_size,
            checkpoint_seconds=checkpoint_seconds,
        )
        train = replace(given.train, accumulation=accumulation, seed=seed, **settings)
        follow(
            RunCommand(
                workspace,
                data,
                workspace.root / name,
                train,
                resume=resume,
                command=sys.argv,
                init_from=init_from,
                device=device,
            )
        )
