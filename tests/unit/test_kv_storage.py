"""Keys and values come back from the slots that they were put into, as views where they can."""

from __future__ import annotations

import pytest
import torch

from flashduet.kv.storage import KVStorage, LayerShape

SHAPES = [LayerShape(2, 4, 4), LayerShape(1, 8, 6)]


@pytest.fixture
def storage() -> KVStorage:
    return KVStorage(SHAPES, num_blocks=8, block_tokens=4, dtype=torch.float32)


def fill(storage: KVStorage, block_ids: list[int], length: int) -> list[tuple]:
    """Write a sequence of random entries, some at a time; returns keys and values by layer."""
    truth = []
    for layer, shape in enumerate(storage.layers):
        keys = torch.randn(length, shape.kv_heads, shape.key_size)
        values = torch.randn(length, shape.kv_heads, shape.value_size)
        for start in range(0, length, 5):
            end = min(start + 5, length)
            slots = storage.locate(block_ids, start, end)
            storage.write(layer, slots, keys[start:end], values[start:end])
        truth.append((keys, values))
    return truth


@pytest.mark.parametrize("block_ids", [[2, 3, 4, 5], [6, 0, 1, 3]])
def test_every_range_reads_what_was_written(storage: KVStorage, block_ids: list[int]) -> None:
    truth = fill(storage, block_ids, 15)
    for layer, (keys, values) in enumerate(truth):
        for start in range(15):
            for end in range(start, 16):
                got = storage.read(layer, block_ids, start, end)
                assert torch.equal(got[0], keys[start:end].transpose(0, 1))
                assert torch.equal(got[1], values[start:end].transpose(0, 1))


def test_sequences_do_not_touch_each_other(storage: KVStorage) -> None:
    first = fill(storage, [0, 2, 4], 12)
    second = fill(storage, [1, 3], 8)
    for layer in range(len(SHAPES)):
        assert torch.equal(
            storage.read(layer, [0, 2, 4], 0, 12)[0], first[layer][0].transpose(0, 1)
        )
        assert torch.equal(storage.read(layer, [1, 3], 0, 8)[1], second[layer][1].transpose(0, 1))


def test_neighbouring_blocks_are_read_without_a_copy(storage: KVStorage) -> None:
    keys, values = storage.read(0, [3, 4, 5], 2, 11)
    assert keys.data_ptr() == storage.keys[0][:, 14].data_ptr()
    assert values.data_ptr() == storage.values[0][:, 14].data_ptr()
    # A run inside scattered blocks is one too.
    assert isinstance(storage.locate([7, 3, 4, 0], 5, 11), slice)
    assert not isinstance(storage.locate([7, 3, 4, 0], 3, 11), slice)


def test_positions_that_no_block_holds_are_refused(storage: KVStorage) -> None:
    with pytest.raises(ValueError, match="positions 0 to 9 wanted, 2 blocks of 4"):
        storage.locate([0, 1], 0, 9)
    with pytest.raises(ValueError, match="positions 5 to 4 wanted"):
        storage.locate([0, 1], 5, 4)
    with pytest.raises(ValueError, match="at least 1"):
        KVStorage(SHAPES, 0, 4, torch.float32)


def test_bytes_are_those_of_all_slots(storage: KVStorage) -> None:
    # Of 8 blocks and the spare one, four bytes a number.
    assert storage.nbytes == 9 * 4 * 4 * sum(shape.numbers for shape in SHAPES)


def test_whole_blocks_are_gathered_in_the_order_given(storage: KVStorage) -> None:
    truth = fill(storage, [6, 0, 1, 3], 16)
    order = torch.tensor([0, 6, 6, 3])
    for layer, (keys, values) in enumerate(truth):
        room = None
        for _ in range(2):
            room = storage.fetch_blocks(layer, order, room)
            for got, written in zip(room, (keys, values), strict=True):
                wanted = [written[4:8], written[:4], written[:4], written[12:]]
                assert torch.equal(got, torch.cat(wanted).transpose(0, 1))


@pytest.mark.parametrize("block_ids", [[2, 3, 4, 5], [6, 0, 1, 3]])
def test_cleared_slots_are_zero_and_no_others(storage: KVStorage, block_ids: list[int]) -> None:
    truth = fill(storage, block_ids, 16)
    storage.clear(storage.locate(block_ids, 5, 12))
    for layer, (keys, _) in enumerate(truth):
        keys[5:12] = 0
        assert torch.equal(storage.read(layer, block_ids, 0, 16)[0], keys.transpose(0, 1))


def test_slots_never_written_hold_finite_numbers(storage: KVStorage) -> None:
    assert all(torch.isfinite(part).all() for part in (*storage.keys, *storage.values))
