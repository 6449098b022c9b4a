"""One attached Ingest stream: its ring, its sessions, and the chunks on their way.

Lives from the handshake to the stream's end; a reconnect makes a new one with a new ring. The
sender owns a chunk's record until the draft has answered it, or has released it if it was lent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flashduet.transport.base import FeatureSender
from flashduet.v1 import draft_pb2
from target_service.drops import RING_FULL, STREAM_LOST, DropCounts
from target_service.feed import FeedState, SessionFeed
from target_service.session import ContextRows

log = logging.getLogger(__name__)


class IngestStream:
    """What a handshake came to.

    Attributes:
        draft_instance_id: 16 bytes.
        layer_ids: whose states the draft wants, in the order of concatenation.
        sender: owns the ring.
        drops: shared by all streams of the service.
    """

    def __init__(
        self,
        draft_instance_id: bytes,
        layer_ids: tuple[int, ...],
        sender: FeatureSender,
        drops: DropCounts,
    ) -> None:
        self.draft_instance_id = draft_instance_id
        self.layer_ids = layer_ids
        self.sender = sender
        self.drops = drops
        self._loop = asyncio.get_running_loop()
        # Bounded by the sender: a chunk is queued only once it has its place in the ring.
        self._outgoing: asyncio.Queue[draft_pb2.IngestRequest] = asyncio.Queue()
        self._feeds: dict[tuple[bytes, int], SessionFeed] = {}
        self._next_sequence = 1
        self._closed = False

    def open_feed(self, session_id: bytes, epoch: int) -> SessionFeed:
        feed = SessionFeed(self, session_id, epoch)
        self._feeds[session_id, epoch] = feed
        return feed

    def forget(self, feed: SessionFeed) -> None:
        self._feeds.pop((feed.session_id, feed.epoch), None)

    def send(self, feed: SessionFeed, rows: ContextRows, traceparent: str) -> None:
        """Engine thread: cut the rows to what the transport takes and queue them.

        Never waits. The first piece without room is dropped with all that follow it, and the feed
        is stale from then on.
        """
        total, width = rows.features.shape
        most = self.sender.max_rows(width, rows.features.dtype)
        for start in range(0, total, most):
            piece = rows.features[start : start + most]
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            base = rows.base + start
            payload = self.sender.put(sequence, feed.session_id, feed.epoch, base, piece)
            if payload is None:
                self.drops.add(STREAM_LOST if self._closed else RING_FULL)
                feed.stop(FeedState.LOST if self._closed else FeedState.STALE)
                return
            chunk = draft_pb2.IngestChunk(
                session_id=feed.session_id,
                epoch=feed.epoch,
                base=base,
                token_ids=rows.token_ids[start : start + most],
                features=payload,
                sequence=sequence,
            )
            self._queue(draft_pb2.IngestRequest(traceparent=traceparent, chunk=chunk))

    async def next_request(self) -> draft_pb2.IngestRequest:
        """The next chunk to write to the stream."""
        return await self._outgoing.get()

    def receive(self, response: draft_pb2.IngestResponse) -> None:
        """An answer of the draft: the record is free, and a refusal ends its session's drafting."""
        for sequence in response.released:
            self.sender.release(sequence)
        kind = response.WhichOneof("message")
        if kind == "ack":
            if not response.ack.lent:
                self.sender.release(response.ack.sequence)
        elif kind == "nack":
            self._refused(response.nack)
        elif kind is not None or not response.released:
            log.warning("an unexpected %s from draft %s", kind, self.draft_instance_id.hex())

    def close(self) -> None:
        """The stream is over: its sessions go on undrafted, its ring is given back."""
        self._closed = True
        for feed in self._feeds.values():
            feed.stop(FeedState.LOST)
        self._feeds.clear()
        self.sender.close()

    def _refused(self, nack: draft_pb2.IngestNack) -> None:
        self.sender.release(nack.sequence)
        feed = self._feeds.get((nack.session_id, nack.epoch))
        reason = _reason_name(nack.reason)
        if feed is None:
            # Chunks of a session that ended on both sides are still answered; nothing is lost.
            return
        self.drops.add(reason)
        log.warning(
            "session %s: the draft refused a chunk (%s), it has %d rows",
            nack.session_id.hex(),
            reason,
            nack.have,
        )
        feed.stop(FeedState.STALE)

    def _queue(self, request: draft_pb2.IngestRequest) -> None:
        put: Callable[[draft_pb2.IngestRequest], None] = self._outgoing.put_nowait
        self._loop.call_soon_threadsafe(put, request)


def _reason_name(reason: int) -> str:
    known = draft_pb2.NackReason.DESCRIPTOR.values_by_number.get(reason)
    return known.name.removeprefix("NACK_REASON_") if known else "UNKNOWN"
