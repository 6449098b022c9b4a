"""Blocks are nobody's or somebody's, and a found prefix is the prefix that was asked for."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from flashduet.kv.blocks import BlockPool, BlockTable, chain_digests

BLOCKS, SIZE = 12, 4
KEYS = (b"one", b"two")
# Two tokens only, so that random sequences share prefixes.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6 * SIZE)


class Sequence:
    def __init__(self, tokens: list[int], key: bytes) -> None:
        self.tokens, self.key, self.table = tokens, key, BlockTable()


class PoolMachine(RuleBasedStateMachine):
    """Random sequences over a tiny pool whose blocks are really written."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        # What lies at each slot: key and tokens that its keys and values were computed from.
        self.slots: list[object] = [None] * (BLOCKS * SIZE)
        self.living: list[Sequence] = []

    sequences = Bundle("sequences")

    @rule(target=sequences, tokens=TOKENS, key=st.sampled_from(KEYS), most=st.integers(0, 24))
    def open(self, tokens: list[int], key: bytes, most: int) -> Sequence:
        made = Sequence(tokens, key)
        found = self.pool.find(tokens, key)
        taken = self.pool.adopt(made.table, tokens, key, most)
        assert taken == made.table.length == min(found, most // SIZE * SIZE)
        assert found < len(tokens)
        self.living.append(made)
        return made

    @rule(given=sequences, count=st.integers(1, 9))
    def compute(self, given: Sequence, count: int) -> None:
        table = given.table
        end = min(table.length + count, len(given.tokens))
        free, held = self.pool.free_blocks, list(table.block_ids)
        if not self.pool.reserve(table, end):
            assert (self.pool.free_blocks, table.block_ids) == (free, held)
            assert self.pool.blocks_for(end) - len(held) > free
            return
        for position in range(table.length, end):
            self.slots[self.slot(table, position)] = self.meaning(given, position)
        table.length = end

    @rule(given=sequences)
    def publish(self, given: Sequence) -> None:
        self.pool.publish(given.table, given.tokens, given.key)

    @rule(given=sequences, count=st.integers(0, 5), token=st.integers(0, 1))
    def change_its_mind(self, given: Sequence, count: int, token: int) -> None:
        """Other tokens at the end: what is published must not change under others."""
        length = max(0, given.table.length - count)
        left = self.pool.rewind(given.table, length)
        assert left == given.table.length <= length
        given.tokens = [*given.tokens[:left], token, token]

    @rule(given=sequences, count=st.integers(0, 3))
    def roll_back(self, given: Sequence, count: int) -> None:
        table = given.table
        table.length = max(len(table.chain) * SIZE, table.length - count)

    @rule(target=sequences, given=consumes(sequences))
    def release(self, given: Sequence) -> object:
        self.pool.release(given.table)
        assert (given.table.block_ids, given.table.length, given.table.chain) == ([], 0, [])
        self.living.remove(given)
        return multiple()

    @invariant()
    def every_position_holds_its_own(self) -> None:
        for given in self.living:
            for position in range(given.table.length):
                held = self.slots[self.slot(given.table, position)]
                assert held == self.meaning(given, position)

    @invariant()
    def blocks_are_shared_only_where_sealed(self) -> None:
        holders: dict[int, list[bytes | None]] = {}
        for given in self.living:
            table = given.table
            assert len(set(table.block_ids)) == len(table.block_ids)
            chain = [*table.chain, *[None] * (len(table.block_ids) - len(table.chain))]
            for block_id, digest in zip(table.block_ids, chain, strict=True):
                holders.setdefault(block_id, []).append(digest)
        for digests in holders.values():
            assert len(digests) == 1 or (len(set(digests)) == 1 and digests[0] is not None)
        assert self.pool.free_blocks == BLOCKS - len(holders)
        assert 0 <= self.pool.cached_blocks <= self.pool.free_blocks

    def teardown(self) -> None:
        for given in self.living:
            self.pool.release(given.table)
        assert self.pool.free_blocks == BLOCKS
        # All of them can be had again, in one run, and none twice.
        table = BlockTable()
        assert self.pool.reserve(table, BLOCKS * SIZE)
        assert sorted(table.block_ids) == list(range(BLOCKS))
        assert (self.pool.free_blocks, self.pool.cached_blocks) == (0, 0)

    @staticmethod
    def slot(table: BlockTable, position: int) -> int:
        return table.block_ids[position // SIZE] * SIZE + position % SIZE

    @staticmethod
    def meaning(given: Sequence, position: int) -> object:
        return given.key, tuple(given.tokens[: position + 1])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=40)


def filled(pool: BlockPool, tokens: list[int], key: bytes = b"") -> BlockTable:
    """A table that holds and has published `tokens`, computed or adopted."""
    table = BlockTable()
    pool.adopt(table, tokens, key, len(tokens))
    assert pool.reserve(table, len(tokens))
    table.length = len(tokens)
    pool.publish(table, tokens, key)
    return table


def test_a_sequence_that_grows_stays_one_run_beside_others() -> None:
    pool = BlockPool(256, 4)
    tables = [BlockTable() for _ in range(8)]
    for length in range(4, 100, 4):
        for table in tables:
            assert pool.reserve(table, length)
    for table in tables:
        first = table.block_ids[0]
        assert table.block_ids == list(range(first, first + 24))


def test_runs_join_again_when_sequences_end() -> None:
    pool = BlockPool(64, 4)
    tables = [BlockTable() for _ in range(16)]
    for table in tables:
        assert pool.reserve(table, 16)
    for table in tables[::2] + tables[1::2]:
        pool.release(table)
    whole = BlockTable()
    assert pool.reserve(whole, 256)
    assert whole.block_ids == list(range(64))


def test_a_found_prefix_leaves_a_token_to_compute() -> None:
    pool = BlockPool(8, 4)
    filled(pool, [1] * 8)
    assert pool.find([1] * 8, b"") == 4
    assert pool.find([1] * 9, b"") == 8
    assert pool.find([1] * 3, b"") == 0


def test_a_prefix_is_found_only_under_its_key_and_after_its_own_tokens() -> None:
    pool = BlockPool(8, 4)
    filled(pool, [1, 2, 3, 4, 5, 6, 7, 8], b"a tenant")
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 8, 9], b"a tenant") == 8
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 8, 9], b"another") == 0
    assert pool.find([0, 2, 3, 4, 5, 6, 7, 8, 9], b"a tenant") == 0
    # The second block alone is a prefix of nothing.
    assert pool.find([5, 6, 7, 8, 9], b"a tenant") == 0


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_start() -> None:
    pool = BlockPool(6, 4)
    old, new = [1] * 12, [2] * 12
    for tokens in (old, new, old):
        pool.release(filled(pool, tokens))
    assert pool.cached_blocks == pool.free_blocks == 6
    table = BlockTable()
    assert pool.reserve(table, 16)
    assert pool.find([*new, 0], b"") == 0
    assert pool.find([*old, 0], b"") == 8


def test_a_prefix_in_use_is_not_evicted() -> None:
    pool = BlockPool(4, 4)
    held = filled(pool, [1] * 8)
    other = BlockTable()
    assert not pool.reserve(other, 12)
    assert pool.reserve(other, 8)
    assert pool.find([1] * 9, b"") == 8
    assert not set(other.block_ids) & set(held.block_ids)


def test_a_length_inside_a_sealed_block_is_refused() -> None:
    pool = BlockPool(4, 4)
    table = filled(pool, [1] * 8)
    table.length = 6
    with pytest.raises(ValueError, match="rewind"):
        pool.reserve(table, 9)


def test_rewind_does_not_change_what_others_hold() -> None:
    pool = BlockPool(8, 4)
    first = filled(pool, [1] * 8)
    second = filled(pool, [1] * 9)
    assert second.block_ids[:2] == first.block_ids
    assert pool.rewind(second, 6) == 4, "its second block is shared"
    assert pool.rewind(first, 6) == 6, "nobody else holds it any more"
    assert pool.find([1] * 9, b"") == 4


def test_a_table_with_blocks_adopts_none() -> None:
    pool = BlockPool(4, 4)
    table = filled(pool, [1] * 8)
    with pytest.raises(ValueError, match="cannot adopt"):
        pool.adopt(table, [1] * 8, b"", 8)


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(blocks, tokens)


def test_digests_tell_key_order_and_boundaries_apart() -> None:
    def digests(tokens: list[int], key: bytes = b"") -> list[bytes]:
        return list(chain_digests(tokens, key, 2))

    assert len(digests([1, 2, 3])) == 1
    assert digests([1, 2, 3, 4])[:1] == digests([1, 2, 9, 9])[:1]
    assert len({*digests([1, 2, 3, 4]), *digests([3, 4, 1, 2]), *digests([1, 2], b"k")}) == 5
