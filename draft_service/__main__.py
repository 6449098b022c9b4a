"""`python -m draft_service`: one draft replica, configured by FLASHDUET_DRAFT_* variables."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from flashduet import telemetry
from flashduet.errors import FlashduetError
from flashduet.settings import setup_logging

log = logging.getLogger("draft_service")


async def serve(settings: DraftSettings) -> None:
    """Serve until SIGTERM or SIGINT, also while still loading."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    service = DraftService(settings)
    starting = asyncio.create_task(service.start())
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await waiting
        log.info("stopping")
    finally:
        starting.cancel()
        waiting.cancel()
        await service.stop()


def main() -> int:
    try:
        settings = DraftSettings.load()
        setup_logging(settings.log_level)
        telemetry.setup("draft")
        log.info("configuration:\n%s", settings.describe())
        asyncio.run(serve(settings))
    except FlashduetError as error:
        # The message names the fix; a traceback would only hide it.
        print(f"draft_service: {error.message}", file=sys.stderr)
        return 1
    finally:
        telemetry.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
