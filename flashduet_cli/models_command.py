"""`flashduet models`: what is served and what is on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flashduet.client import AsyncClient, ModelCard
from flashduet.errors import FlashduetError
from flashduet.models_cache import cache_root
from flashduet.settings import DtypeChoice
from flashduet_cli import options
from flashduet_cli.compiling import compile_target
from flashduet_cli.console import fail, note, out, print_json, run, wide
from flashduet_cli.inspection import inspect
from flashduet_cli.pull import pull as pull_model
from flashduet_cli.reach import serving
from flashduet_cli.stack_config import StackConfig

models_app = typer.Typer(
    no_args_is_help=True,
    help="List served and cached models, pull or compile one, or inspect a drafter.",
)
models_app.command(short_help="Tell what a drafter is and fits.")(inspect)


@models_app.command("list", short_help="Tell what is served and cached.")
def list_models(
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT, as_json: options.AsJson = False
) -> None:
    """The models in the user's cache, and those that the gateway at --endpoint serves."""
    served = run(_served(endpoint))
    folders = sorted((cache_root() / "models").glob("[!.]*/config.json"))
    cached = [
        {
            "name": file.parent.name.rpartition("-")[0],
            "folder": str(file.parent),
            "bytes": sum(part.stat().st_size for part in file.parent.iterdir()),
        }
        for file in folders
    ]
    if as_json:
        print_json(
            {
                "served": [
                    {
                        "id": card.id,
                        "context_window": card.context_window,
                        "max_tokens": card.max_tokens,
                        "drafter": card.drafter,
                        "block_length": card.block_length,
                    }
                    for card in served
                ],
                "cached": cached,
            }
        )
        return
    table = Table("model", "where", "details")
    for column in table.columns:
        # Folders are there to be copied.
        column.overflow = "fold"
    for card in served:
        drafter = f"drafter {card.drafter}" if card.drafter else "no drafter"
        table.add_row(card.id, f"served at {endpoint}", f"{card.context_window} tokens, {drafter}")
    for entry in cached:
        size = f"{int(str(entry['bytes'])) / 1e6:.0f} MB"
        table.add_row(str(entry["name"]), str(entry["folder"]), size)
    if not served:
        note(f"nothing is served at {endpoint}")
    if not cached:
        note("nothing is cached; `flashduet models pull` gets the default target")
    wide().print(table)


@models_app.command(short_help="Get a model into the cache.")
def pull(
    reference: Annotated[
        str, typer.Argument(help="default, a .gguf file, a Hub id, or hub/id:file.gguf")
    ] = "default",
    as_json: options.AsJson = False,
) -> None:
    """Download a model, convert it if need be, and keep it in the user's cache."""
    try:
        folder = pull_model(reference)
    except FlashduetError as error:
        fail(error.message)
    except KeyboardInterrupt:
        fail("interrupted; what was finished is kept", 130)
    if as_json:
        print_json({"reference": reference, "folder": str(folder)})
    else:
        out.print(str(folder), soft_wrap=True)


@models_app.command("compile", short_help="Compile a target ahead of its first start.")
def compile_model(
    reference: Annotated[
        str, typer.Argument(help="default, a folder, a .gguf file, or a Hub id")
    ] = "default",
    dtype: Annotated[DtypeChoice, typer.Option(help="As it will be served.")] = "bfloat16",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Compile a target's forward pass into the user's cache, for this machine and these choices.

    A target service does it by itself, in the background of its first start. Takes minutes and a
    C++ compiler; the file is found again by later starts with the same model, type and threads.
    """
    config = StackConfig(model=reference, dtype=dtype, device="cpu", threads=threads, draft=False)
    file = run(compile_target(config))
    if as_json:
        print_json({"reference": reference, "dtype": dtype, "file": str(file)})
    else:
        out.print(str(file), soft_wrap=True)


async def _served(endpoint: str) -> list[ModelCard]:
    if not await serving(endpoint):
        return []
    async with AsyncClient(endpoint) as client:
        return await client.models()
