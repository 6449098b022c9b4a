"""uvicorn in the loop that grpc.aio runs in, without its hands on the process's signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from flashduet.errors import ConfigurationError
from gateway.http.protocol import BoundedHeadProtocol


class _Server(uvicorn.Server):
    """Signals belong to `gateway.__main__`, which stops gRPC and HTTP together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One listening socket; `port` is known once it is started."""

    def __init__(self, app: FastAPI, shutdown_grace_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHeadProtocol,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(shutdown_grace_s)),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, listen: str) -> None:
        """
        Raises:
            ConfigurationError: the address cannot be bound.
        """
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            listener = socket.create_server(
                (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"cannot listen on {listen!r} ({error}); choose another host:port with "
                "FLASHDUET_GATEWAY_HTTP_LISTEN"
            ) from error
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http")

    async def stop(self) -> None:
        """Let requests end within the grace, then cut them off."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
