"""`python -m draft_service`: one draft replica, configured by FLASHDUET_DRAFT_* variables."""

from __future__ import annotations

import asyncio
import logging
import sys

import flashduet.grpc_polling  # before grpc is
import flashduet.idle_threads  # noqa: F401  before torch is

# isort: split
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from flashduet import process

log = logging.getLogger("draft")


async def serve(settings: DraftSettings) -> None:
    """Serve until SIGTERM or SIGINT, also while still loading."""
    stop = process.stop_requested()
    service = DraftService(settings)
    starting = asyncio.create_task(service.start())
    waiting = asyncio.create_task(stop.wait())
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


if __name__ == "__main__":
    sys.exit(process.run("draft", DraftSettings, serve))
