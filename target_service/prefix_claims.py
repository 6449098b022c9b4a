"""Which session computes a block that others wait for, so that a common prefix is computed once."""

from __future__ import annotations

from collections.abc import Iterable

from target_service.seat import Seat


class PrefixClaims:
    """Block digests that some running session is about to compute. Guarded by the owner's lock."""

    def __init__(self) -> None:
        self._claims: dict[bytes, Seat] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def holder(self, digest: bytes) -> Seat | None:
        return self._claims.get(digest)

    def claim(self, seat: Seat, digests: Iterable[bytes]) -> None:
        """What nobody computes yet, this session does."""
        for digest in digests:
            if self._claims.setdefault(digest, seat) is seat:
                seat.claimed.append(digest)

    def done(self, seat: Seat, digests: Iterable[bytes]) -> None:
        """These blocks can be found now."""
        if not seat.claimed:
            return
        found = set(digests)
        for digest in found:
            if self._claims.get(digest) is seat:
                del self._claims[digest]
        seat.claimed = [digest for digest in seat.claimed if digest not in found]

    def drop(self, seat: Seat) -> None:
        """The session computes nothing any more; another takes over what it had claimed."""
        for digest in seat.claimed:
            if self._claims.get(digest) is seat:
                del self._claims[digest]
        seat.claimed.clear()
