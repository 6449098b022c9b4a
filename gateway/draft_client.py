"""Watches draft replicas: one long-lived Propose stream to each, for all its sessions."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from flashduet import rpc
from flashduet.v1 import draft_pb2 as pb
from flashduet.v1.draft_pb2_grpc import DraftServiceStub
from gateway.budget import BudgetLimits, LatencyBudget
from gateway.draft_link import DraftLink
from gateway.draft_session import DraftSession
from gateway.health import Health, ask_health
from gateway.request import ValidRequest

logger = logging.getLogger(__name__)

SERVICE = "flashduet.v1.DraftService"
_UNARY_TIMEOUT_S = 2.0


class DraftReplica:
    """Keeps a Propose stream to one endpoint, reconnecting for as long as `run` runs."""

    def __init__(self, endpoint: str, limits: BudgetLimits, poll_s: float) -> None:
        self.endpoint = endpoint
        self._limits = limits
        self._poll_s = poll_s
        self._channel = rpc.open_channel(endpoint)
        self._link: DraftLink | None = None

    @property
    def info(self) -> pb.DraftServiceGetModelInfoResponse | None:
        """What the replica says about itself; None while it is not reachable."""
        return self._link.info if self._link is not None else None

    @property
    def sessions(self) -> int:
        return len(self._link.sessions) if self._link is not None else 0

    def session(
        self, session_id: bytes, target_instance_id: bytes, request: ValidRequest, choice: int
    ) -> DraftSession:
        """A session to open; the replica must be reachable (`info` is not None)."""
        if self._link is None:
            raise RuntimeError("a session was asked of a draft that is not reachable")
        opening = pb.ProposeOpen(
            choice=choice,
            target_instance_id=target_instance_id,
            sampling=request.sampling.to_proto(),
            prompt_length=len(request.prompt_ids),
            token_ids=request.prompt_ids,
            cache_salt=request.cache_salt,
            drafter_only=request.speculation.drafter_only,
        )
        return DraftSession(self._link, session_id, opening)

    async def run(self) -> None:
        stub = DraftServiceStub(self._channel)
        try:
            while True:
                try:
                    await self._serve(stub)
                except grpc.RpcError as error:
                    logger.debug("draft %s: %s", self.endpoint, error)
                except Exception:  # Whatever a draft says, requests go on without it.
                    logger.exception("draft %s: its stream is given up", self.endpoint)
                if self._link is not None:
                    logger.warning(
                        "draft %s: stream ended; decoding goes on without", self.endpoint
                    )
                    self._link = None
                await asyncio.sleep(self._poll_s)
        finally:
            self._link = None
            await self._channel.close(None)

    async def _serve(self, stub: DraftServiceStub) -> None:
        if await ask_health(self._channel, SERVICE) is not Health.SERVING:
            return
        info = await stub.GetModelInfo(
            pb.DraftServiceGetModelInfoRequest(), timeout=_UNARY_TIMEOUT_S
        )
        # A restarted draft may be quick or slow in another way: it is measured anew.
        self._link = DraftLink(info, LatencyBudget(self._limits, time.monotonic))
        logger.info(
            "draft %s: drafter %r, block length %d", self.endpoint, info.name, info.block_length
        )
        await self._link.carry(stub)
