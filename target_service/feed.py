"""One session's features on their way to one draft."""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING

from flashduet.transport.negotiation import transport_name
from target_service.drops import SEND_FAILED
from target_service.session import ContextRows

if TYPE_CHECKING:
    from target_service.ingest_stream import IngestStream

log = logging.getLogger(__name__)


class FeedState(Enum):
    """Whether the draft has, or will have, the session's whole context."""

    DRAFTING = "drafting"
    # A chunk was dropped or refused: later ones would leave a gap.
    STALE = "stale"
    # The stream that it went by is gone.
    LOST = "lost"


class SessionFeed:
    """Made when a session opens, closed when it ends; leaves DRAFTING once and for all.

    `publish` runs in the engine thread, everything else in the event loop. Both only ever write
    another final state, so no lock is needed.
    """

    def __init__(self, stream: IngestStream, session_id: bytes, epoch: int) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self._stream = stream
        self._state = FeedState.DRAFTING

    @property
    def state(self) -> FeedState:
        return self._state

    @property
    def drafting(self) -> bool:
        return self._state is FeedState.DRAFTING

    @property
    def transport(self) -> str:
        """Name of the way that the features take, for spans."""
        return transport_name(self._stream.sender.transport)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers that the draft is conditioned on; empty once it is not fed any more."""
        return self._stream.layer_ids if self.drafting else ()

    def publish(self, rows: ContextRows, traceparent: str) -> None:
        """Put rows into the ring and queue their descriptors; what does not fit ends drafting."""
        if not self.drafting:
            return
        try:
            self._stream.send(self, rows, traceparent)
        except Exception:
            # A fault of the transport costs this session its drafts, never its tokens.
            log.exception("features of session %s could not be sent", self.session_id.hex())
            self._stream.drops.add(SEND_FAILED)
            self.stop(FeedState.STALE)

    def stop(self, state: FeedState) -> None:
        """No more features from now on."""
        if self.drafting:
            self._state = state
            log.info("session %s goes on undrafted: %s", self.session_id.hex(), state.value)

    def close(self) -> None:
        """The session is over."""
        self._stream.forget(self)
