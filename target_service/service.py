"""The parts of a running target service, and their life from weights to shutdown."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from flashduet.kv.blocks import BlockPool
from flashduet.settings import split_endpoints
from flashduet.transport.negotiation import offers
from flashduet.transport.options import MIB, TransportOptions
from target_service.draft_link import TargetIdentity
from target_service.engine import Engine
from target_service.load import LoadedTarget
from target_service.publisher import Publisher
from target_service.scheduler import Scheduler
from target_service.sessions import Limits, Sessions
from target_service.settings import NumericsChoice, TargetSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetService:
    """Owns the engine thread and the links to drafts; made and closed in the event loop."""

    identity: TargetIdentity
    device: str
    numerics: NumericsChoice
    sessions: Sessions
    scheduler: Scheduler
    publisher: Publisher

    @classmethod
    def start(cls, settings: TargetSettings, target: LoadedTarget, engine: Engine) -> TargetService:
        """Begin to serve a loaded and warmed-up target.

        Raises:
            ConfigurationError: a transport that cannot be had.
        """
        possible = tuple(offers(settings.transport, str(target.device)))
        identity = TargetIdentity(os.urandom(16), target.facts, possible)
        options = TransportOptions(
            choice=settings.transport,
            device=str(target.device),
            socket_dir=settings.socket_dir,
            ring_bytes=settings.ring_mib * MIB,
        )
        pool = BlockPool(engine.kv.num_blocks, engine.kv.block_tokens)
        window = min(target.facts.context_window, pool.num_blocks * pool.block_tokens)
        if window < target.facts.context_window:
            log.warning(
                "the context window is cut from %d to %d tokens, for which there are blocks",
                target.facts.context_window,
                window,
            )
            target.facts.context_window = window
        limits = Limits(
            context_window=window,
            vocab_size=target.facts.vocab_size,
            max_sessions=settings.max_sessions,
            max_block_length=settings.max_block_length,
        )
        scheduler = Scheduler(
            engine,
            pool,
            max_step_tokens=settings.max_step_tokens,
            chunk_tokens=settings.prefill_chunk_tokens,
        )
        endpoints = split_endpoints(settings.drafts)
        publisher = Publisher(endpoints, identity, options, engine.features)
        scheduler.start()
        publisher.start()
        return cls(
            identity=identity,
            device=str(target.device),
            numerics=settings.numerics,
            sessions=Sessions(limits),
            scheduler=scheduler,
            publisher=publisher,
        )

    async def close(self) -> None:
        """Stop the engine, then give the rings back."""
        await self.scheduler.close()
        await self.publisher.close()
