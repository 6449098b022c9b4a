"""Blocks for sessions: what is found again, who must wait, and who gives way when none are left."""

from __future__ import annotations

from flashduet.kv.blocks import BlockPool, chain_digests
from target_service.prefix_claims import PrefixClaims
from target_service.seat import Seat

# A session that nothing was asked of for so long gives its blocks to any other.
_IDLE_S = 2.0


class Seating:
    """The sessions' blocks. Guarded by the scheduler's lock; no step is under way in `start`,
    `reserve` and `preempt`.

    A session takes blocks as it fills them. When none are left, the youngest session gives all of
    its own and computes them again later. The oldest one can take from all others and fits alone,
    so it always gets on, and with it every session in its time.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.seats: set[Seat] = set()
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self._claims = PrefixClaims()

    def start(self, seat: Seat, now: float) -> bool:
        """Let a session without blocks begin (again), with the blocks that are found for it.

        False where it should wait: for a prefix that another session computes just now, or for
        room.
        """
        if self._waits(seat):
            return False
        session = seat.session
        self.pool.adopt(session.table, session.token_ids, session.cache_key, _reusable(seat))
        if not self._has_room(seat, now):
            self.pool.release(session.table)
            return False
        seat.running = True
        self._count_prompt(seat)
        self._claims.claim(seat, self._chain(seat)[len(session.table.block_ids) :])
        return True

    def reserve(self, seat: Seat, length: int, now: float) -> bool:
        """Make room for positions 0..length-1, if need be at the cost of those who give way."""
        while not self.pool.reserve(seat.session.table, length):
            victim = self._victim(seat, now)
            if victim is None:
                return False
            self.preempt(victim)
        return True

    def room(self, seat: Seat) -> int:
        """Positions after the table's length that it has, or could have, blocks for."""
        table = seat.session.table
        blocks = len(table.block_ids) + self.pool.free_blocks
        return blocks * self.pool.block_tokens - table.length

    def _count_prompt(self, seat: Seat) -> None:
        """What was found of a prompt when it first began needs no computing."""
        if seat.counted or seat.job is None:
            return
        seat.counted = True
        seat.job.cached_tokens = seat.session.table.length
        self.prompt_tokens += seat.session.committed_length
        self.cached_prompt_tokens += seat.session.table.length

    def preempt(self, seat: Seat) -> None:
        """Take a session's blocks; it computes them again when its turn comes."""
        self.publish(seat)
        self._empty(seat)
        self.preemptions += 1

    def publish(self, seat: Seat) -> None:
        """Let full blocks be found by later sessions, and by those that wait for them."""
        session = seat.session
        known = len(session.table.chain)
        self.pool.publish(session.table, session.token_ids, session.cache_key)
        self._claims.done(seat, session.table.chain[known:])

    def leave(self, seat: Seat) -> None:
        """The session is over."""
        self.publish(seat)
        self._empty(seat)
        self.seats.discard(seat)

    def _empty(self, seat: Seat) -> None:
        self.pool.release(seat.session.table)
        self._claims.drop(seat)
        seat.running, seat.chain, seat.waits_for = False, None, None

    def _waits(self, seat: Seat) -> bool:
        if seat.waits_for is not None and self._claims.holder(seat.waits_for) is not None:
            return True
        seat.waits_for = None
        session, size = seat.session, self.pool.block_tokens
        held = self.pool.find(session.token_ids, session.cache_key)
        chain, next_block = self._chain(seat), held // size
        if next_block >= len(chain) or held + size > _reusable(seat):
            return False
        holder = self._claims.holder(chain[next_block])
        if holder is None or (holder.session.batch and not session.batch):
            return False
        seat.waits_for = chain[next_block]
        return True

    def _chain(self, seat: Seat) -> list[bytes]:
        if seat.chain is None:
            session = seat.session
            # One token is always left to compute, so a block that ends it is not waited for.
            tokens = session.token_ids[: len(session.token_ids) - 1]
            seat.chain = list(chain_digests(tokens, session.cache_key, self.pool.block_tokens))
        return seat.chain

    def _has_room(self, seat: Seat, now: float) -> bool:
        """Whether a beginner finds blocks for all of its tokens, without starving its elders."""
        wanted = self._still_wanted(seat)
        available = self.pool.free_blocks
        for other in self.seats:
            if other is seat or not other.session.table.block_ids:
                continue
            if self._gives_way(other, seat, now):
                available += len(other.session.table.block_ids)
            elif other.job is not None or not other.idle(now, _IDLE_S):
                wanted += max(1, self._still_wanted(other))
        return wanted <= available

    def _still_wanted(self, seat: Seat) -> int:
        session = seat.session
        length = min(session.committed_length + seat.usual_rows, session.token_limit)
        return self.pool.blocks_for(length) - len(session.table.block_ids)

    def _victim(self, seat: Seat, now: float) -> Seat | None:
        """Who gives way: a session that has been idle for long, else the youngest of all."""
        candidates = [
            other
            for other in self.seats
            if other.session.table.block_ids and self._gives_way(other, seat, now)
        ]
        return max(
            candidates, key=lambda other: (other.idle(now, _IDLE_S), other.age_key), default=None
        )

    @staticmethod
    def _gives_way(other: Seat, seat: Seat, now: float) -> bool:
        return other is not seat and (other.age_key > seat.age_key or other.idle(now, _IDLE_S))


def _reusable(seat: Seat) -> int:
    """Leading positions that need not be computed if their keys and values are found: features
    that the draft lacks come from computing alone."""
    job, session = seat.job, seat.session
    drafted = job is not None and bool(job.layer_ids)
    return session.draft_context_hit if drafted else session.committed_length
