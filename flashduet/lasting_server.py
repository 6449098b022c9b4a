"""A grpc.aio server that no caller can end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_REBIND_S = 1.0
# Calls that were under way when gRPC gave their server up may go on for so long.
_DRAIN_S = 600.0


class LastingServer:
    """Built again, on the same port, whenever gRPC gives the server up.

    grpc.aio reads the path of a call to an unknown method in the loop that takes calls. A path that
    is no UTF-8 ends that loop, and the server with it: one frame, and the port is closed for the
    rest of the process's life. Nothing of ours is asked before, so that the end is watched for.
    Calls under way go on with the old server, new ones come to the new one.
    """

    def __init__(self, make: Callable[[], grpc.aio.Server]) -> None:
        """`make` gives a server with interceptors and options, without handlers."""
        self._make = make
        self._server = make()
        self._handlers: list[Callable[[Any], None]] = []
        self._address = ""
        self._given_up: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As grpc.aio.Server has it."""
        self._add(lambda server: server.add_generic_rpc_handlers(handlers))

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """As grpc.aio.Server has it."""
        self._add(lambda server: server.add_registered_method_handlers(service, handlers))

    def add_insecure_port(self, address: str) -> int:
        """The port that is bound.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        port = self._server.add_insecure_port(address)
        host, colon, _ = address.rpartition(":")
        self._address = f"{host}:{port}" if colon and not address.startswith("unix:") else address
        return port

    async def start(self) -> None:
        await self._server.start()
        self._watch = asyncio.create_task(self._keep(), name="grpc-server-watch")

    async def stop(self, grace_s: float | None) -> None:
        """Refuse new calls at once, and cancel those under way after `grace_s`."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        draining = list(self._given_up)
        for task in draining:
            task.cancel()
        await self._server.stop(grace_s)
        await asyncio.gather(*draining, return_exceptions=True)

    def _add(self, add: Callable[[Any], None]) -> None:
        self._handlers.append(add)
        add(self._server)

    async def _keep(self) -> None:
        while True:
            try:
                await self._server.wait_for_termination(_POLL_S)
            except Exception as error:
                logger.warning("gRPC gave its server up (%r); building it again", error)
                await self._rebuild()

    async def _rebuild(self) -> None:
        draining = asyncio.create_task(_drain(self._server), name="grpc-server-drain")
        self._given_up.add(draining)
        draining.add_done_callback(self._given_up.discard)
        self._server = self._make()
        for add in self._handlers:
            add(self._server)
        while True:
            try:
                self._server.add_insecure_port(self._address)
                break
            except RuntimeError:
                logger.warning("%s cannot be bound again yet", self._address)
                await asyncio.sleep(_REBIND_S)
        await self._server.start()


async def _drain(server: grpc.aio.Server) -> None:
    """Let the calls of a server that was given up come to their ends."""
    try:
        await server.stop(_DRAIN_S)
    except asyncio.CancelledError:
        await server.stop(None)
        raise
