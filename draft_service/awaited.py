"""Prefixes on their way: rows that another session's target is sending just now.

When many sessions with a common prefix open at once, none of its rows are held yet. The first to
open gets them sent; the others are promised them, so that their target computes and sends only what
follows. Rows that follow a promised prefix keep until it is written and can be adopted. If its
leader ends before that and nobody else brings it, the promise is broken: the session holds what
there is, the next chunk finds a gap, and its request goes on undrafted.
"""

from __future__ import annotations

from draft_service.context_pool import ContextPool
from draft_service.sessions import Awaiting, Session, SessionTable


class AwaitedPrefixes:
    """Who waits for whose rows. For the event loop's thread alone."""

    def __init__(self, sessions: SessionTable, contexts: ContextPool) -> None:
        self._sessions = sessions
        self._contexts = contexts

    def promise(self, session: Session) -> None:
        """Let the session wait for the longest prefix that another one is being sent, if any."""
        leader, rows = self._leader(session)
        if leader is not None and rows > session.context.end:
            session.awaiting = Awaiting(leader, rows, rows)

    def followers(self, leader: Session) -> list[Session]:
        """Sessions that wait for this one's rows."""
        return [
            session
            for session in self._sessions.all()
            if session.awaiting is not None and session.awaiting.leader is leader
        ]

    def settle(self, session: Session) -> bool:
        """Adopt the promised prefix if it is there; true once there is no more waiting for it.

        If its leader no longer brings it another one may; if none does the promise is broken, and
        the context is shorter than the promise.
        """
        awaiting, held = session.awaiting, session.context
        assert awaiting is not None
        brought = self._brings(awaiting.leader, session) >= awaiting.rows
        if brought and awaiting.leader.context.table.length < awaiting.rows:
            return False
        if self._contexts.find(held) < awaiting.rows:
            leader, rows = self._leader(session)
            if leader is not None and rows >= awaiting.rows:
                awaiting.leader = leader
                return False
        if self._contexts.adopt(held, awaiting.rows) < awaiting.rows:
            # Nor will it bring the rest to others.
            del held.token_ids[held.end :]
        session.awaiting = None
        return True

    def _leader(self, session: Session) -> tuple[Session | None, int]:
        """Who brings the longest prefix, and its rows."""
        best: tuple[Session | None, int] = (None, 0)
        for other in self._sessions.all():
            if other is not session and (rows := self._brings(other, session)) > best[1]:
                best = (other, rows)
        return best

    def _brings(self, leader: Session, session: Session) -> int:
        """Leading rows, in whole blocks, that are the same in both and leave a token to compute.

        Of one target only: then the leader's rows come before those that follow them.
        """
        ours, theirs = session.context, leader.context
        if (
            leader.awaiting is not None
            or not self._sessions.is_open(leader)
            or leader.terms.target_instance_id != session.terms.target_instance_id
            or theirs.key != ours.key
        ):
            return 0
        rows, size = 0, self._contexts.block_rows
        most = min(len(theirs.token_ids), len(ours.token_ids) - 1)
        while rows + size <= most:
            block = slice(rows, rows + size)
            if theirs.token_ids[block] != ours.token_ids[block]:
                break
            rows += size
        return rows
