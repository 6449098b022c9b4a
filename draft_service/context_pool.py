"""Which session holds which blocks of context, and what is found again by its tokens.

All of it is for the event loop's thread. Rows are taken here (their blocks reserved) before the
engine writes them, and blocks are published only once it has: what is found is always there. A
released block may be written by a step that is under way for its old holder; its new holder's rows
come in later steps, and the engine works in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draft_service.context import Context, ContextPlan
from draft_service.work import IngestWork
from flashduet.kv.blocks import BlockPool, BlockTable
from flashduet.sampling.history import TokenHistory


@dataclass(eq=False, slots=True)
class HeldContext:
    """One session's share of the store.

    Attributes:
        key: what must agree, besides the tokens, for its rows to be another's.
        token_ids: of the sequence as far as they are known: those given at the opening, and those
            that came with rows.
        end: rows taken; the engine may not have written the last of them yet.
        table: its blocks; the table's own length counts rows that are written.
        engine: the engine's view of it.
    """

    key: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    end: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    engine: Context = field(default_factory=Context)

    def holds(self, token_ids: Sequence[int], base: int) -> None:
        """These are the tokens of the rows from `base` on, whatever was said before."""
        self.token_ids[base : base + len(token_ids)] = token_ids


class ContextPool:
    """Blocks of all sessions."""

    def __init__(self, plan: ContextPlan) -> None:
        self._pool = BlockPool(plan.num_blocks, plan.block_rows)

    @property
    def blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_rows(self) -> int:
        return self._pool.block_tokens

    @property
    def rows(self) -> int:
        """Rows that all blocks have room for."""
        return self.blocks * self.block_rows

    @property
    def free_blocks(self) -> int:
        """Blocks that no session holds."""
        return self._pool.free_blocks

    @property
    def free_rows(self) -> int:
        return self.free_blocks * self.block_rows

    @property
    def cached_blocks(self) -> int:
        """Those of the free ones that still hold a prefix."""
        return self._pool.cached_blocks

    def open(
        self,
        key: bytes = b"",
        token_ids: Sequence[int] = (),
        history: TokenHistory | None = None,
    ) -> HeldContext:
        """A new session's context, with the leading rows of `token_ids` that are held already.

        Args:
            history: empty, for a session whose sampling looks at its tokens.
        """
        held = HeldContext(key, list(token_ids), engine=Context(history=history))
        self.adopt(held, len(held.token_ids))
        return held

    def find(self, held: HeldContext) -> int:
        """Leading rows of its tokens that are there to be adopted."""
        return self._pool.find(held.token_ids, held.key)

    def adopt(self, held: HeldContext, most: int) -> int:
        """Hold up to `most` leading rows that are there; returns the context's end.

        What it held before is let go. Nothing may be queued for it.
        """
        self._pool.release(held.table)
        held.engine.truncate(0)
        held.end = self._pool.adopt(held.table, held.token_ids, held.key, most)
        held.engine.extend(held.token_ids[: held.end])
        return held.end

    def has_room(self, held: HeldContext, rows: int) -> bool:
        """Whether so many more rows fit; if so their room is the session's."""
        return self._pool.reserve(held.table, held.end + rows)

    def take(self, held: HeldContext, token_ids: Sequence[int], features: Tensor) -> IngestWork:
        """Rows after the context, for which there is room; one token id a row."""
        base = held.end
        held.holds(token_ids, base)
        held.end = base + len(token_ids)
        block_ids = tuple(held.table.block_ids)
        return IngestWork(held.engine, base, tuple(token_ids), features, block_ids)

    def blocks_for(self, held: HeldContext, rows: int) -> tuple[int, ...]:
        """The context's blocks, with room for a block's rows after it if that can be had."""
        self._pool.reserve(held.table, held.end + rows)
        return tuple(held.table.block_ids)

    def written(self, held: HeldContext, end: int) -> None:
        """The rows before `end` are in the store: they may be found from now on."""
        held.table.length = end
        self._pool.publish(held.table, held.token_ids, held.key)

    def rewind(self, held: HeldContext, length: int) -> int:
        """Cut the context back to `length` rows, or to fewer where it shares a block; its end."""
        self._pool.rewind(held.table, length)
        held.end = min(held.end, length, len(held.table.block_ids) * self.block_rows)
        del held.token_ids[held.end :]
        return held.end

    def close(self, held: HeldContext) -> None:
        """Give the blocks back; what was published stays findable until its room is needed."""
        self._pool.release(held.table)
