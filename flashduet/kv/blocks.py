"""Which sequence holds which blocks of keys and values, and which blocks hold which tokens.

A block holds `block_tokens` positions of one sequence. A full block of committed tokens can be
published: it is then found by the tokens that lead up to it, may be shared by any number of
sequences, and is never written again. Blocks that nobody holds any more keep a published prefix
until their room is needed, least recently used first. No torch here, and no lock: a pool belongs to
one thread, or to whoever holds its owner's lock.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from flashduet.kv.free_runs import FreeRuns

# Nobody may find another's keys and values by a forged prefix, so digests are of full strength.
_DIGEST_BYTES = 32
# One in so many blocks is freed beyond need, so that growing sequences find runs and not crumbs.
_SPARE_SHARE = 64


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks.

    Attributes:
        block_ids: block i holds positions i*block_tokens.. .
        length: positions whose keys and values are there. Setting a smaller one is a rollback; it
            must not cut a sealed block, for which there is `BlockPool.rewind`.
        chain: digests of the leading sealed blocks, which were adopted or published.
    """

    block_ids: list[int] = field(default_factory=list)
    length: int = 0
    chain: list[bytes] = field(default_factory=list)


def chain_digests(token_ids: Sequence[int], key: bytes, block_tokens: int) -> Iterator[bytes]:
    """A digest a full block: of the key, of all tokens before the block, and of its own."""
    return _continue_chain(token_ids, _root(key), 0, block_tokens)


def _continue_chain(
    token_ids: Sequence[int], previous: bytes, first: int, block_tokens: int
) -> Iterator[bytes]:
    for start in range(first * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = array("I", token_ids[start : start + block_tokens]).tobytes()
        previous = blake2b(previous + block, digest_size=_DIGEST_BYTES).digest()
        yield previous


def _root(key: bytes) -> bytes:
    return blake2b(key, digest_size=_DIGEST_BYTES, person=b"fd-kv-root").digest()


class BlockPool:
    """Hands out `num_blocks` blocks of `block_tokens` positions each.

    Every block is in exactly one state: held by one or more tables, idle with a published prefix,
    or free.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"{num_blocks} blocks of {block_tokens} tokens: at least 1 of each")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        # Published blocks that nobody holds, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._free = FreeRuns(num_blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._free.count + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Those of the free ones that still hold a prefix."""
        return len(self._idle)

    def blocks_for(self, length: int) -> int:
        """Blocks that so many positions take."""
        return -(-length // self.block_tokens)

    def reserve(self, table: BlockTable, length: int) -> bool:
        """Grow the table so that positions 0..length-1 have their place.

        False when blocks are wanting; nothing has changed then.

        Raises:
            ValueError: the table's length was set into a sealed block.
        """
        if table.length < len(table.chain) * self.block_tokens:
            raise ValueError(f"length {table.length} cuts a sealed block: use rewind")
        wanted = self.blocks_for(length) - len(table.block_ids)
        if wanted <= 0:
            return True
        if wanted > self.free_blocks:
            return False
        if wanted > self._free.count:
            self._evict(wanted - self._free.count + self.num_blocks // _SPARE_SHARE)
        taken = self._free.take(wanted, table.block_ids[-1] if table.block_ids else None)
        for block_id in taken:
            self._holders[block_id] = 1
        table.block_ids += taken
        return True

    def release(self, table: BlockTable) -> None:
        """Empty the table. Its published blocks stay findable until their room is needed."""
        self._drop(table, 0)
        table.length = 0

    def rewind(self, table: BlockTable, length: int) -> int:
        """Forget positions from `length` on for good, published ones too; the length that is left.

        It is smaller than asked for, down to the start of a block, where that block is shared.
        """
        keep = length // self.block_tokens
        if keep < len(table.chain):
            if length % self.block_tokens and self._unpublish(table.block_ids[keep]):
                del table.chain[keep:]
            else:
                length = keep * self.block_tokens
        self._drop(table, self.blocks_for(length))
        table.length = min(table.length, length)
        return table.length

    def find(self, token_ids: Sequence[int], key: bytes) -> int:
        """Leading positions held: a multiple of block_tokens, and fewer than there are tokens, so
        that one is left to compute."""
        return len(self._held(token_ids, key)) * self.block_tokens

    def adopt(self, table: BlockTable, token_ids: Sequence[int], key: bytes, most: int) -> int:
        """Take up to `most` leading positions that `find` finds into an empty table; its length.

        Raises:
            ValueError: the table is not empty.
        """
        if table.block_ids:
            raise ValueError(f"a table of {len(table.block_ids)} blocks cannot adopt any")
        for digest in self._held(token_ids, key)[: max(0, most) // self.block_tokens]:
            block_id = self._published[digest]
            self._idle.pop(block_id, None)
            self._holders[block_id] += 1
            table.block_ids.append(block_id)
            table.chain.append(digest)
        table.length = len(table.block_ids) * self.block_tokens
        return table.length

    def publish(self, table: BlockTable, token_ids: Sequence[int], key: bytes) -> None:
        """Seal the full blocks up to the table's length and let them be found.

        Where equal ones are published already, the table keeps its own, which nobody finds.

        Raises:
            ValueError: there are fewer token ids than positions.
        """
        if len(token_ids) < table.length:
            raise ValueError(f"{len(token_ids)} token ids for {table.length} positions")
        sealed, full = len(table.chain), table.length // self.block_tokens
        if full <= sealed:
            return
        previous = table.chain[-1] if sealed else _root(key)
        known = token_ids[: full * self.block_tokens]
        for digest in _continue_chain(known, previous, sealed, self.block_tokens):
            block_id = table.block_ids[len(table.chain)]
            table.chain.append(digest)
            if digest not in self._published:
                self._published[digest] = block_id
                self._digests[block_id] = digest

    def _held(self, token_ids: Sequence[int], key: bytes) -> list[bytes]:
        held: list[bytes] = []
        most = (len(token_ids) - 1) // self.block_tokens
        for digest in chain_digests(token_ids, key, self.block_tokens):
            if len(held) == most or digest not in self._published:
                break
            held.append(digest)
        return held

    def _drop(self, table: BlockTable, keep: int) -> None:
        """Let go of all blocks but the first `keep`, the last one first: its prefix outlives it."""
        while len(table.block_ids) > keep:
            block_id = table.block_ids.pop()
            self._holders[block_id] -= 1
            if self._holders[block_id]:
                continue
            if self._digests[block_id] is None:
                self._free.put(block_id)
            else:
                self._idle[block_id] = None
        del table.chain[keep:]

    def _evict(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            block_id, _ = self._idle.popitem(last=False)
            self._unpublish(block_id)
            self._free.put(block_id)

    def _unpublish(self, block_id: int) -> bool:
        """Let nobody find the block any more; false when more than one table holds it."""
        if self._holders[block_id] > 1:
            return False
        digest = self._digests[block_id]
        if digest is not None:
            del self._published[digest]
            self._digests[block_id] = None
        return True
