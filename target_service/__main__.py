"""`python -m target_service`: run the target service until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

from flashduet import telemetry
from flashduet.errors import FlashduetError
from flashduet.rpc import Server
from flashduet.settings import setup_logging
from flashduet.v1 import target_pb2_grpc
from target_service.engine import Engine
from target_service.load import LoadedTarget, load_target
from target_service.server import SERVICE_NAME, TargetServicer
from target_service.service import TargetService
from target_service.settings import TargetSettings

log = logging.getLogger("target_service")

_LOADER = "load-weights"
_T = TypeVar("_T")


def main() -> int:
    """Exit status 0 after a stop that was asked for, 2 for a configuration that cannot work."""
    try:
        settings = TargetSettings.load()
        setup_logging(settings.log_level)
        telemetry.setup("target")
        log.info("settings:\n%s", settings.describe())
        asyncio.run(serve(settings))
    except FlashduetError as error:
        print(f"target service: {error}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()
    if any(thread.name == _LOADER for thread in threading.enumerate()):
        # Stopped while loading: tearing the interpreter down under torch's C++ would abort.
        logging.shutdown()
        os._exit(0)
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
        stopped = asyncio.create_task(stop.wait())
        loaded = _in_daemon_thread(lambda: _load(settings))
        either: set[asyncio.Future[Any]] = {stopped, loaded}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            target, engine = loaded.result()
            servicer.service = TargetService.start(settings, target, engine)
            await server.serving()
            name = target.facts.name
            log.info("serving %s on port %d (%s)", name, server.port, target.device)
        await stopped
    finally:
        log.info("stopping")
        await server.stop(settings.shutdown_grace_s)
        if servicer.service is not None:
            await servicer.service.close()


def _in_daemon_thread(work: Callable[[], _T]) -> asyncio.Future[_T]:
    """Run `work` on a thread that a stop need not wait for: weights can take minutes to arrive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(_T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=_LOADER, daemon=True).start()
    return future


def _load(settings: TargetSettings) -> tuple[LoadedTarget, Engine]:
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    target = load_target(settings)
    engine = Engine(target)
    engine.warm_up()
    return target, engine


if __name__ == "__main__":
    sys.exit(main())
