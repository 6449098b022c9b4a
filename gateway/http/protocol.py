"""HTTP/1.1 as uvicorn speaks it, with a bound on how long a request's head may take.

uvicorn bounds the silence between two requests, but not a first request that never comes, nor a
head that comes byte by byte; either would hold a connection for ever.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedHeadProtocol(H11Protocol):
    """Closes a connection whose client takes longer than `head_s` to say what it wants."""

    head_s = 30.0
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Wait from the head's first moment on, and no longer once the request is there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.head_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
