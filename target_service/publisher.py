"""The draft replicas that this target feeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flashduet.transport.options import TransportOptions
from target_service.draft_link import DraftLink, TargetIdentity
from target_service.drops import DropCounts
from target_service.features import FeatureCapture
from target_service.feed import SessionFeed
from target_service.ingest_stream import IngestStream


class Publisher:
    """One link an endpoint, each on its own; all of them may be away."""

    def __init__(
        self,
        endpoints: Sequence[str],
        identity: TargetIdentity,
        options: TransportOptions,
        features: FeatureCapture,
    ) -> None:
        self.drops = DropCounts()
        self._links = [
            DraftLink(endpoint, identity, options, features, self.drops) for endpoint in endpoints
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(link.run()) for link in self._links]

    async def close(self) -> None:
        """End all streams and give their rings back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open_feed(
        self, draft_instance_id: bytes, session_id: bytes, epoch: int
    ) -> SessionFeed | None:
        """The way to that draft for a new session; None when it is not attached now."""
        for stream in self.streams():
            if stream.draft_instance_id == draft_instance_id:
                return stream.open_feed(session_id, epoch)
        return None

    def streams(self) -> list[IngestStream]:
        """Drafts attached right now."""
        return [link.stream for link in self._links if link.stream is not None]

    @property
    def ring_records(self) -> int:
        """Records written and not yet answered."""
        return sum(stream.sender.outstanding for stream in self.streams())
