"""`python -m gateway`: run the gateway until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import flashduet.grpc_polling  # noqa: F401  before grpc is

# isort: split
from flashduet import process
from flashduet.models import tokenizer_hash
from flashduet.rpc import Server
from flashduet.v1.gateway_pb2_grpc import add_GatewayServiceServicer_to_server
from gateway.api_keys import ApiKeys, RequireApiKey
from gateway.gateway import Gateway
from gateway.http import HttpServer, create_app
from gateway.locate import locate
from gateway.router import Router
from gateway.self_tests import SelfTests
from gateway.server import SERVICE, GatewayServicer
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenizer

logger = logging.getLogger("gateway")

_READINESS_POLL_S = 0.1


def main() -> int:
    # Tokenizers need no torch, and Transformers imports it wherever it finds it: hundreds of
    # megabytes and seconds of start-up for nothing. A module that is None counts as not installed.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    return process.run("gateway", GatewaySettings, serve)


async def serve(settings: GatewaySettings) -> None:
    """Answer health checks at once, requests when tokenizer and a target are there."""
    keys = ApiKeys.load(settings)
    if not keys.required:
        logger.info("no API keys are set: whoever reaches the ports may ask")
    stop = process.stop_requested()
    router = Router(settings)
    gateway = Gateway(settings, router)
    server = Server([SERVICE], [RequireApiKey(keys)])
    add_GatewayServiceServicer_to_server(GatewayServicer(gateway), server.grpc)
    http = HttpServer(create_app(gateway, settings, keys), settings.shutdown_grace_s)
    await server.start(settings.listen)
    running = asyncio.create_task(_run(settings, router, gateway, server), name="gateway")
    stopping = asyncio.create_task(stop.wait())
    try:
        await http.start(settings.http_listen)
        logger.info("gRPC on port %d, HTTP on port %d", server.port, http.port)
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        # Requests under way get their grace while target and draft are still connected.
        logger.info("stopping")
        await asyncio.gather(server.stop(settings.shutdown_grace_s), http.stop())
        running.cancel()
        stopping.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _run(settings: GatewaySettings, router: Router, gateway: Gateway, server: Server) -> None:
    """Load the tokenizer, watch the replicas, and say truthfully whether requests can be served."""
    folder = await locate(settings.model)
    tokenizer, digest = await asyncio.to_thread(_load, folder)
    router.expect_tokenizer(digest)
    gateway.tokenizer = tokenizer
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(router.run(), name="router")
        if settings.speculation != "off":
            tasks.create_task(SelfTests(gateway, router).run(), name="self tests")
        serving = False
        while True:
            served = gateway.served()
            if serving != (served is not None):
                serving = served is not None
                logger.info("serving: %s", served.name if served is not None else "nothing")
                await (server.serving() if serving else server.not_serving())
            await asyncio.sleep(_READINESS_POLL_S)


def _load(folder: Path) -> tuple[Tokenizer, str]:
    return Tokenizer(folder), tokenizer_hash(folder)


if __name__ == "__main__":
    sys.exit(main())
