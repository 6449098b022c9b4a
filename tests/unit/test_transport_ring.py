"""The ring's bookkeeping: no two records share a byte, and room always comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashduet.transport.ring import ALIGNMENT, HEADER_BYTES, Ring, Slot, record_size

# Few enough cache lines that random scripts meet every border.
CAPACITY = 1024
scripts = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 448)),
        st.tuples(st.just("free"), st.integers(0, 7)),
    ),
    max_size=120,
)


def assert_apart(slot: Slot, live: list[Slot], capacity: int) -> None:
    assert slot.offset % ALIGNMENT == 0
    assert slot.offset >= 0
    assert slot.offset + slot.size <= capacity
    for other in live:
        assert slot.offset + slot.size <= other.offset or other.offset + other.size <= slot.offset


def test_in_a_ring_of_five_lines_no_script_of_six_steps_makes_records_overlap() -> None:
    """Every border, exhaustively: records of 1 to 3 lines, the oldest or the newest freed."""
    steps: tuple[int | str, ...] = (0, 64, 128, "oldest", "newest")
    for script in itertools.product(steps, repeat=6):
        ring = Ring(5 * ALIGNMENT)
        live: list[Slot] = []
        for step in script:
            if isinstance(step, str):
                if live:
                    ring.free(live.pop(0 if step == "oldest" else -1).generation)
            elif slot := ring.allocate(step):
                assert_apart(slot, live, ring.capacity)
                live.append(slot)


@settings(max_examples=100, deadline=None)
@given(scripts)
def test_live_records_never_overlap_and_stay_inside(script: list[tuple[str, int]]) -> None:
    ring = Ring(CAPACITY)
    live: list[Slot] = []
    last_generation = 0
    for what, number in script:
        if what == "free" and live:
            ring.free(live.pop(number % len(live)).generation)
        elif what == "allocate":
            slot = ring.allocate(number)
            if slot is None:
                assert live, "an empty ring has room for every record that fits"
                continue
            assert slot.size >= HEADER_BYTES + number
            assert_apart(slot, live, ring.capacity)
            assert slot.generation > last_generation
            last_generation = slot.generation
            live.append(slot)
        assert ring.live == len(live)


@settings(max_examples=100, deadline=None)
@given(scripts)
def test_after_everything_is_freed_the_whole_ring_is_one_record_again(
    script: list[tuple[str, int]],
) -> None:
    ring = Ring(CAPACITY)
    live = []
    for what, number in script:
        if what == "allocate" and (slot := ring.allocate(number)):
            live.append(slot)
    for slot in reversed(live):
        ring.free(slot.generation)
    whole = ring.allocate(CAPACITY - HEADER_BYTES)
    assert whole is not None
    assert whole.offset == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, CAPACITY // 4 - HEADER_BYTES), min_size=1, max_size=300))
def test_a_reader_one_record_behind_never_meets_a_full_ring(sizes: list[int]) -> None:
    ring = Ring(CAPACITY)
    previous: Slot | None = None
    for size in sizes:
        slot = ring.allocate(size)
        assert slot is not None
        if previous is not None:
            ring.free(previous.generation)
        previous = slot


def test_an_empty_ring_starts_over_in_the_bytes_it_used_last() -> None:
    ring = Ring(1024)
    for _ in range(3):
        slots = [ring.allocate(10), ring.allocate(10)]
        assert [slot.offset for slot in slots if slot] == [0, 128]
        for slot in slots:
            assert slot is not None
            ring.free(slot.generation)


def test_a_reader_that_keeps_up_meets_the_same_few_bytes_in_a_large_ring() -> None:
    ring = Ring(1 << 20)
    live: list[Slot] = []
    for _ in range(1000):
        slot = ring.allocate(10)
        assert slot is not None
        assert slot.offset < 3 * record_size(10)
        live.append(slot)
        if len(live) == 3:
            ring.free(live.pop(0).generation)


def test_a_full_ring_says_so_and_has_room_again_after_any_of_its_records() -> None:
    ring = Ring(1024)
    first, second = ring.allocate(448), ring.allocate(448)
    assert first is not None
    assert second is not None
    for freed in (second, first):
        assert ring.allocate(1) is None
        ring.free(freed.generation)
        again = ring.allocate(448)
        assert again is not None
        assert again.offset == freed.offset


def test_freeing_twice_or_something_unknown_changes_nothing() -> None:
    ring = Ring(1024)
    kept, freed = ring.allocate(10), ring.allocate(10)
    assert kept is not None
    assert freed is not None
    for generation in (freed.generation, freed.generation, 0, kept.generation + 99):
        ring.free(generation)
    assert ring.live == 1


def test_a_record_larger_than_the_ring_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="ring of 1024"):
        Ring(1024).allocate(1024)


def test_generations_of_two_rings_do_not_meet() -> None:
    first, second = Ring(1024).allocate(1), Ring(1024).allocate(1)
    assert first is not None
    assert second is not None
    assert abs(first.generation - second.generation) > 1_000_000


def test_record_size_is_whole_cache_lines() -> None:
    assert [record_size(n) for n in (0, 1, 64, 65)] == [64, 128, 128, 192]
