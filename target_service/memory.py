"""What memory the target takes, decided and printed before it serves."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from flashduet.errors import ConfigurationError
from flashduet.hardware import available_memory
from flashduet.settings import split_endpoints
from flashduet.transport.options import MIB
from target_service.flash_varlen import block_size
from target_service.graphs import obstacle
from target_service.load import LoadedTarget
from target_service.settings import TargetSettings

log = logging.getLogger(__name__)

# Of the memory that is free at the start; the draft and the rest of the machine need some too.
_SHARE = 3
# What recorded passes may take where there are any: of the free memory a part at most.
_GRAPH_BYTES, _GRAPH_SHARE = 1024 * MIB, 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use.

    Attributes:
        num_blocks: of keys and values, allocated once.
        block_tokens: positions of a block.
        kv_bytes_per_token: over all layers.
        graph_bytes: that recorded passes may take, 0 where passes are not recorded.
    """

    weight_bytes: int
    num_blocks: int
    block_tokens: int
    kv_bytes_per_token: int
    rings: int
    ring_bytes: int
    graph_bytes: int

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    def print(self) -> None:
        log.info(
            "memory plan: weights %.0f MiB, KV %.0f MiB (%d blocks of %d tokens of %d bytes), "
            "rings %d x %d MiB, CUDA graphs up to %.0f MiB",
            self.weight_bytes / MIB,
            self.kv_tokens * self.kv_bytes_per_token / MIB,
            self.num_blocks,
            self.block_tokens,
            self.kv_bytes_per_token,
            self.rings,
            self.ring_bytes / MIB,
            self.graph_bytes / MIB,
        )


def plan_memory(settings: TargetSettings, target: LoadedTarget) -> MemoryPlan:
    """The plan for a loaded target.

    Raises:
        ConfigurationError: there is memory for not one short session; names the setting.
    """
    size = block_size(settings, target.device, target.dtype)
    free = _free_bytes(target)
    graph_bytes = 0
    if reason := obstacle(settings, target.device, target.dtype):
        if target.device.type == "cuda":
            log.info("passes run without CUDA graphs: %s", reason)
    else:
        graph_bytes = min(_GRAPH_BYTES, free // _GRAPH_SHARE)
    tokens = settings.max_kv_tokens or _affordable_tokens(
        settings, target, free - graph_bytes, size
    )
    if tokens < 2:
        raise ConfigurationError(
            f"FLASHDUET_TARGET_MAX_KV_TOKENS={settings.max_kv_tokens}: a session takes at least 2"
        )
    return MemoryPlan(
        weight_bytes=target.weight_bytes,
        num_blocks=max(1, tokens // size),
        block_tokens=size,
        kv_bytes_per_token=target.kv_bytes_per_token,
        rings=len(split_endpoints(settings.drafts)),
        ring_bytes=settings.ring_mib * MIB,
        graph_bytes=graph_bytes,
    )


def _free_bytes(target: LoadedTarget) -> int:
    if target.device.type == "cuda":
        return torch.cuda.mem_get_info(target.device)[0]
    return available_memory()


def _affordable_tokens(
    settings: TargetSettings, target: LoadedTarget, free: int, block_tokens: int
) -> int:
    """All sessions at full length, or what a part of the free memory holds if that is less."""
    wanted = settings.max_sessions * target.facts.context_window
    tokens = min(wanted, free // _SHARE // target.kv_bytes_per_token)
    if tokens < 2 * block_tokens:
        raise ConfigurationError(
            f"no memory for keys and values: {free} bytes are free, a token takes "
            f"{target.kv_bytes_per_token}; free some, or set FLASHDUET_TARGET_MAX_KV_TOKENS"
        )
    return tokens
