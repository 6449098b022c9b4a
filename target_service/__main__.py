"""`python -m target_service`: run the target service until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from typing import Any

import flashduet.grpc_polling  # before grpc is
import flashduet.idle_threads  # noqa: F401  before torch is

# isort: split
import torch

from flashduet import process
from flashduet.hardware import compute_threads
from flashduet.rpc import Server
from flashduet.v1 import target_pb2_grpc
from target_service.compiled.adoption import Adoption, adopt_or_plan
from target_service.compiled.background import BackgroundCompilation
from target_service.engine import Engine
from target_service.load import LoadedTarget, load_target
from target_service.memory import plan_memory
from target_service.server import SERVICE_NAME, TargetServicer
from target_service.service import TargetService
from target_service.settings import TargetSettings

log = logging.getLogger("target")

# The engine's thread asks for the interpreter after every operation; where it has to take turns
# with the event loop's, it should not be for the 5 ms that Python gives each by itself.
_SWITCH_INTERVAL_S = 0.0005


async def serve(settings: TargetSettings) -> None:
    """Answer health checks at once, everything else when weights are loaded and warm."""
    stop = process.stop_requested()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server, servicer = Server([SERVICE_NAME]), TargetServicer()
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    await server.start(settings.listen)
    compilation: BackgroundCompilation | None = None
    try:
        stopped = asyncio.create_task(stop.wait())
        loaded = process.load_in_background(lambda: _load(settings))
        either: set[asyncio.Future[Any]] = {stopped, loaded}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            service, adoption = _start(settings, *loaded.result())
            del loaded, either  # the weights may go when passes are compiled
            servicer.service = service
            await server.serving()
            name = service.identity.facts.name
            log.info("serving %s on port %d (%s)", name, server.port, service.device)
            if adoption is not None:
                compilation = adoption.begin()
        await stopped
    finally:
        log.info("stopping")
        if compilation is not None:
            await compilation.close()
        await server.stop(settings.shutdown_grace_s)
        if servicer.service is not None:
            await servicer.service.close()


def _start(
    settings: TargetSettings, target: LoadedTarget, engine: Engine, adoption: Adoption | None
) -> tuple[TargetService, Adoption | None]:
    return TargetService.start(settings, target, engine), adoption


def _load(settings: TargetSettings) -> tuple[LoadedTarget, Engine, Adoption | None]:
    torch.set_num_threads(compute_threads(settings.threads))
    target = load_target(settings)
    plan = plan_memory(settings, target)
    plan.print()
    engine = Engine(target, plan.num_blocks, plan.block_tokens, settings.numerics, plan.graph_bytes)
    engine.warm_up()
    adoption = adopt_or_plan(settings, target, engine)
    # What is there now stays: a collection that looks through a million objects of torch and
    # Transformers would hold up a step by a tenth of a second.
    gc.collect()
    gc.freeze()
    return target, engine, adoption


if __name__ == "__main__":
    sys.exit(process.run("target", TargetSettings, serve))
