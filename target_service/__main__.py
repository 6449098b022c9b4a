"""`python -m target_service`: run the target service until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import torch

from flashduet import telemetry
from flashduet.errors import ConfigurationError
from flashduet.rpc import Server
from flashduet.settings import setup_logging
from flashduet.v1 import target_pb2_grpc
from target_service.engine import Engine
from target_service.load import LoadedTarget, load_target
from target_service.server import SERVICE_NAME, TargetServicer
from target_service.service import TargetService
from target_service.settings import TargetSettings

log = logging.getLogger("target_service")


def main() -> int:
    """Exit status 0 after a stop that was asked for, 2 for a configuration that cannot work."""
    try:
        settings = TargetSettings.load()
        setup_logging(settings.log_level)
        telemetry.setup("target")
        log.info("settings:\n%s", settings.describe())
        asyncio.run(serve(settings))
    except ConfigurationError as error:
        print(f"target service: {error}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()
    return 0


async def serve(settings: TargetSettings) -> None:
    """Answer health checks at once, everything else when weights are loaded and warm."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server, servicer = Server([SERVICE_NAME]), TargetServicer()
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    await server.start(settings.listen)
    try:
        target, engine = await asyncio.to_thread(_load, settings)
        servicer.service = TargetService.start(settings, target, engine)
        await server.serving()
        facts = target.facts
        log.info("serving %s on port %d (%s)", facts.name, server.port, target.device)
        await stop.wait()
    finally:
        log.info("stopping")
        await server.stop(settings.shutdown_grace_s)
        if servicer.service is not None:
            await servicer.service.close()


def _load(settings: TargetSettings) -> tuple[LoadedTarget, Engine]:
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    target = load_target(settings)
    engine = Engine(target)
    engine.warm_up()
    return target, engine


if __name__ == "__main__":
    sys.exit(main())
