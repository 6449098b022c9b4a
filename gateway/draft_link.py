"""One Propose stream to a draft replica, and the sessions that it carries.

Messages are queued without waiting, so that a session can be closed from any cleanup.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio

from flashduet.v1 import draft_pb2 as pb
from flashduet.v1.draft_pb2_grpc import DraftServiceStub
from gateway.budget import LatencyBudget

if TYPE_CHECKING:
    from gateway.draft_session import DraftSession

logger = logging.getLogger(__name__)

# A draft that leaves so many messages unread is gone for our purposes.
_MOST_UNSENT = 4096


class DraftLink:
    """One Propose stream while it is up, and the sessions opened over it."""

    def __init__(self, info: pb.DraftServiceGetModelInfoResponse, budget: LatencyBudget) -> None:
        self.info = info
        self.budget = budget
        self.alive = True
        # An opening got no answer in time: no more of them until the draft says anything again.
        self.stalled = False
        self.sessions: dict[bytes, DraftSession] = {}
        self._overflowed = False
        self._vocab_size = info.target_facts.vocab_size
        self._unsent: deque[pb.ProposeRequest] = deque()
        self._filled = asyncio.Event()
        self._call: grpc.aio.StreamStreamCall | None = None

    def send(self, message: pb.ProposeRequest) -> None:
        """Queue a message without waiting; a draft that reads none of them is cut off."""
        self._unsent.append(message)
        self._filled.set()
        if len(self._unsent) > _MOST_UNSENT and self._call is not None:
            self._overflowed = True
            self._call.cancel()

    def valid(self, token_ids: list[int]) -> bool:
        """Whether the target could take these as draft tokens."""
        return not token_ids or max(token_ids) < self._vocab_size

    async def carry(self, stub: DraftServiceStub) -> None:
        """Run the stream until it ends; then every session on it has lost its draft.

        Raises:
            grpc.RpcError: the stream broke.
        """
        call = self._call = stub.Propose()
        beating = asyncio.create_task(self._beat(), name="draft-heartbeats")
        # Our own task rather than an iterator that grpc.aio would read: it leaves that one waiting
        # for ever where the stream breaks.
        writing = asyncio.create_task(self._write(call), name="draft-messages")
        try:
            async for response in call:
                self.stalled = False
                if (session := self.sessions.get(response.session_id)) is not None:
                    session.receive(response)
        except asyncio.CancelledError:
            # Either `send` ended the call, or the gateway ends this task, or both.
            task = asyncio.current_task()
            if not self._overflowed or (task is not None and task.cancelling()):
                raise
            logger.warning("a draft reads nothing any more; its stream is cut off")
        finally:
            beating.cancel()
            writing.cancel()
            call.cancel()
            self.alive = False
            for session in list(self.sessions.values()):
                session.lose("draft_lost")

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        """Send what is queued, in order, until the stream ends; reading it tells why."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._unsent:
                    await call.write(self._unsent.popleft())
                self._filled.clear()
                await self._filled.wait()

    async def _beat(self) -> None:
        """Renew all leases three times within a lease, so that two lost beats do no harm."""
        while True:
            await asyncio.sleep(max(self.info.lease_ms, 300) / 3000)
            for session in list(self.sessions.values()):
                session.heartbeat()
