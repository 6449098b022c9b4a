"""What every service's process does the same way: start, stop on a signal, exit truthfully."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, cast

from flashduet import telemetry
from flashduet.errors import FlashduetError
from flashduet.settings import ServiceSettings, setup_logging

_LOADER = "loader"
# As shells use it: what was asked for cannot be done.
EXIT_CONFIGURATION = 2

Settings = TypeVar("Settings", bound=ServiceSettings)
Loaded = TypeVar("Loaded")


def run(
    role: str,
    settings_type: type[Settings],
    serve: Callable[[Settings], Coroutine[Any, Any, None]],
) -> int:
    """Read the settings, print them, and serve; the process's exit status.

    Args:
        role: "target", "draft" or "gateway", for logs and spans.
        serve: returns after a stop that was asked for.

    Returns:
        0 after such a stop, 2 with a message on stderr for a configuration that cannot work.
    """
    try:
        settings = settings_type.load()
        setup_logging(settings.log_level)
        telemetry.setup(role)
        log = logging.getLogger(role)
        log.info("settings:\n%s", settings.describe())
        for variable in settings.unknown_variables():
            log.warning("%s is no setting of this service and is ignored; misspelt?", variable)
        asyncio.run(serve(settings))
    except FlashduetError as error:
        # The message names the fix; a traceback would only hide it.
        print(f"{role}: {error.message}", file=sys.stderr)
        return EXIT_CONFIGURATION
    finally:
        telemetry.shutdown()
    if any(thread.name == _LOADER for thread in threading.enumerate()):
        # Stopped while loading: tearing the interpreter down under torch's C++ would abort.
        logging.shutdown()
        os._exit(0)
    return 0


def stop_requested() -> asyncio.Event:
    """Set by SIGINT or SIGTERM from now on. Call it once, in the event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def load_in_background(work: Callable[[], Loaded]) -> asyncio.Future[Loaded]:
    """Run `work` beside the event loop, on a thread that a stop need not wait for.

    Weights can take minutes to arrive; health checks are answered meanwhile, and a process that is
    told to stop does not wait for a download.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()

    def settle(result: Loaded | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            # Whoever was told to stop meanwhile does not ask, which is no mistake of ours.
            future.exception()
        else:
            future.set_result(cast(Loaded, result))

    def run_work() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run_work, name=_LOADER, daemon=True).start()
    return future
