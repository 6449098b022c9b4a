"""`flashduet up`: the local stack until Ctrl-C."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from flashduet_cli import options
from flashduet_cli.console import err, fail, log_line, note, run
from flashduet_cli.pull import pull_in_thread
from flashduet_cli.reach import undrafted_if_unknown
from flashduet_cli.stack import Stack, StackConfig


def up(
    model: options.Model = None,
    drafter: options.Drafter = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Start no draft service.")] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    transport: options.Transport = None,
    threads: options.Threads = None,
    free_ports: Annotated[
        bool, typer.Option("--free-ports", help="Choose free ports instead of the usual ones.")
    ] = False,
    startup_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for a service to load, on an idle machine.")
    ] = 180.0,
) -> None:
    """Start target, draft and gateway, and stop them all on Ctrl-C or SIGTERM.

    Every FLASHDUET_* variable is passed on to the services; an option wins over its variable.
    """
    if no_draft and drafter is not None:
        fail("--no-draft and --drafter exclude each other", 2)
    config = StackConfig(
        model=model,
        drafter=drafter,
        draft=not no_draft,
        dtype=dtype,
        device=device,
        transport=transport,
        threads=threads,
        free_ports=free_ports,
        startup_timeout_s=startup_timeout,
    )
    run(_up(undrafted_if_unknown(config)))


async def _up(config: StackConfig) -> None:
    await pull_in_thread(config.model_reference)
    async with Stack(config, log=log_line, event=_event) as stack:
        err.print(
            f"[bold]ready[/]: gRPC on {stack.endpoint}, OpenAI API on {stack.http_url}/v1 "
            "(Ctrl-C stops it)",
            soft_wrap=True,
        )
        try:
            await stack.wait()
        except asyncio.CancelledError:
            # Ctrl-C is how it is meant to end.
            note("stopping")


def _event(service: str, what: str) -> None:
    log_line(service, f"» {what}")
