"""The parts of a running target service, and their life from weights to shutdown."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from flashduet.errors import ConfigurationError
from flashduet.hardware import available_memory
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
from target_service.settings import TargetSettings

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TargetService:
    """Owns the engine thread and the links to drafts; made and closed in the event loop."""

    identity: TargetIdentity
    device: str
    sessions: Sessions
    scheduler: Scheduler
    publisher: Publisher

    @classmethod
    def start(cls, settings: TargetSettings, target: LoadedTarget, engine: Engine) -> TargetService:
        """Begin to serve a loaded and warmed-up target.

        Raises:
            ConfigurationError: a transport that cannot be had, or memory for not one session.
        """
        possible = tuple(offers(settings.transport, str(target.device)))
        identity = TargetIdentity(os.urandom(16), target.facts, possible)
        options = TransportOptions(
            choice=settings.transport,
            device=str(target.device),
            socket_dir=settings.socket_dir,
            ring_bytes=settings.ring_mib * MIB,
        )
        limits = Limits(
            context_window=target.facts.context_window,
            vocab_size=target.facts.vocab_size,
            max_sessions=settings.max_sessions,
            max_kv_tokens=kv_tokens(settings, target),
            max_block_length=settings.max_block_length,
        )
        endpoints = split_endpoints(settings.drafts)
        _print_memory_plan(settings, target, limits, len(endpoints))
        scheduler = Scheduler(engine, chunk_tokens=settings.prefill_chunk_tokens)
        publisher = Publisher(endpoints, identity, options, engine.features)
        scheduler.start()
        publisher.start()
        return cls(
            identity=identity,
            device=str(target.device),
            sessions=Sessions(limits, BlockPool(engine.kv.num_blocks, engine.kv.block_tokens)),
            scheduler=scheduler,
            publisher=publisher,
        )

    async def close(self) -> None:
        """Stop the engine, then give the rings back."""
        await self.scheduler.close()
        await self.publisher.close()


def kv_tokens(settings: TargetSettings, target: LoadedTarget) -> int:
    """Tokens of keys and values that all sessions may hold together."""
    return settings.max_kv_tokens or _affordable_kv_tokens(settings, target)


def load_engine(settings: TargetSettings, target: LoadedTarget) -> Engine:
    """An engine with blocks for all sessions, the last block of each being used in part."""
    blocks = -(-kv_tokens(settings, target) // BLOCK_TOKENS) + settings.max_sessions
    return Engine(target, blocks, BLOCK_TOKENS)


def _affordable_kv_tokens(settings: TargetSettings, target: LoadedTarget) -> int:
    """All sessions at full length, or what half of the free memory holds if that is less."""
    if target.device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(target.device)[0]
    else:
        free = available_memory()
    wanted = settings.max_sessions * target.facts.context_window
    tokens = min(wanted, free // 2 // target.kv_bytes_per_token)
    if tokens < 2:
        raise ConfigurationError(
            f"no memory for keys and values: {free} bytes are free, a token takes "
            f"{target.kv_bytes_per_token}; free some, or set FLASHDUET_TARGET_MAX_KV_TOKENS"
        )
    return tokens


def _print_memory_plan(
    settings: TargetSettings, target: LoadedTarget, limits: Limits, links: int
) -> None:
    log.info(
        "memory plan: weights %.0f MiB, KV up to %.0f MiB (%d tokens of %d bytes), "
        "rings %d x %d MiB",
        target.weight_bytes / MIB,
        limits.max_kv_tokens * target.kv_bytes_per_token / MIB,
        limits.max_kv_tokens,
        target.kv_bytes_per_token,
        links,
        settings.ring_mib,
    )
