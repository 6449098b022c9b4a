"""The process from start to stop: listen, load, warm up, serve, and free everything."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from draft_service.context_pool import ContextPool
from draft_service.coordinator import Coordinator
from draft_service.loading import LoadedDrafter, load
from draft_service.messages import Limits
from draft_service.scheduler import Scheduler
from draft_service.server import SERVICE_NAME, DraftServicer, LoadedService
from draft_service.settings import DraftSettings
from draft_service.wire import ID_BYTES
from flashduet import PROTOCOL_VERSION, process, rpc
from flashduet.transport.negotiation import Receivers
from flashduet.transport.options import TransportOptions
from flashduet.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)


class DraftService:
    """One draft replica in this process.

    Args:
        loader: how the drafter is had; replaced only by tests that bring their own engine.
    """

    def __init__(
        self,
        settings: DraftSettings,
        loader: Callable[[DraftSettings], LoadedDrafter] = load,
    ) -> None:
        self._settings = settings
        self._loader = loader
        # New at every start, so that nobody takes a restarted replica for the one that held state.
        self.instance_id = os.urandom(ID_BYTES)
        self._servicer = DraftServicer()
        self._server = rpc.Server([SERVICE_NAME])

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        return self._server.port

    @property
    def loaded(self) -> LoadedService | None:
        """What is served; None while still loading."""
        return self._servicer.loaded

    async def start(self) -> None:
        """Listen (NOT_SERVING), load in a thread of its own, then serve.

        Raises:
            ConfigurationError, CheckpointError, Incompatible: with the fix.
        """
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, self._server.grpc)
        await self._server.start(self._settings.listen)
        drafter = await process.load_in_background(lambda: self._loader(self._settings))
        self._servicer.loaded = await self._assemble(drafter)
        await self._server.serving()
        log.info("serving drafter %s on port %d", drafter.name, self.port)

    async def stop(self) -> None:
        """Finish what is under way within the grace period, and free everything."""
        await self._server.stop(self._settings.shutdown_grace_s)
        if loaded := self._servicer.loaded:
            await loaded.coordinator.stop()
            await loaded.receivers.close()

    async def _assemble(self, drafter: LoadedDrafter) -> LoadedService:
        settings, engine = self._settings, drafter.engine
        receivers = Receivers(
            self.instance_id,
            TransportOptions(settings.transports, str(engine.device), settings.socket_dir),
        )
        await receivers.start()
        limits = Limits(
            settings.max_sessions,
            settings.max_block_length,
            settings.lease_s,
            engine.vocab_size,
        )
        identity = f"{drafter.name} {engine.dtype} {engine.plan.dtype}".encode()
        contexts = ContextPool(engine.plan)
        coordinator = Coordinator(Scheduler(engine), contexts, limits, identity)
        coordinator.start()
        info = draft_pb2.DraftServiceGetModelInfoResponse(
            instance_id=self.instance_id,
            protocol_version=PROTOCOL_VERSION,
            name=drafter.name,
            target_facts=drafter.target_facts,
            block_length=engine.config.block_length,
            target_layer_ids=engine.config.target_layer_ids,
            mask_token_id=engine.config.mask_token_id,
            max_sessions=settings.max_sessions,
            device=str(engine.device),
            lease_ms=int(settings.lease_s * 1000),
            max_block_length=settings.max_block_length,
            self_test=drafter.self_test.to_proto() if drafter.self_test is not None else None,
        )
        return LoadedService(coordinator, receivers, engine.config, info)
