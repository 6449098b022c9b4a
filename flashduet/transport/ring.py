"""Which bytes of a ring are whose: bookkeeping only, no memory is touched here.

Records are given back in any order, and the next one goes to the lowest room that holds it, so that
a pair that keeps up works in the same few, cached bytes however large the ring is. A record is
never split over the ring's end.
"""

from __future__ import annotations

import bisect
import secrets
from dataclasses import dataclass

# Headers are one cache line, and payloads start aligned for every element type.
ALIGNMENT = 64
HEADER_BYTES = 64


@dataclass(slots=True)
class Slot:
    """A stretch of the ring: `size` bytes from `offset`, header included."""

    offset: int
    size: int
    generation: int


def record_size(nbytes: int) -> int:
    """Bytes that a record with a payload of `nbytes` occupies."""
    return -(-(HEADER_BYTES + nbytes) // ALIGNMENT) * ALIGNMENT


class Ring:
    """Allocator of variable-length records in `capacity` bytes. Not thread-safe.

    Generations grow by one from a random start and are never 0, so a descriptor of another ring or
    of an overwritten record cannot match by accident.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        # By offset, so that the rooms between them are met from the lowest one on.
        self._slots: list[Slot] = []
        self._by_generation: dict[int, Slot] = {}
        self._next_generation = secrets.randbits(62) + 1

    @property
    def live(self) -> int:
        """Records handed out and not given back."""
        return len(self._slots)

    def allocate(self, nbytes: int) -> Slot | None:
        """A new record with room for `nbytes` of payload, or None when there is no room now.

        Raises:
            ValueError: it would not fit an empty ring.
        """
        size = record_size(nbytes)
        if size > self.capacity:
            raise ValueError(f"a record of {size} bytes in a ring of {self.capacity}")
        end = 0
        for index, slot in enumerate(self._slots):
            if slot.offset - end >= size:
                return self._place(index, end, size)
            end = slot.offset + slot.size
        if self.capacity - end < size:
            return None
        return self._place(len(self._slots), end, size)

    def free(self, generation: int) -> None:
        """Give a record back. Unknown and repeated generations do nothing."""
        slot = self._by_generation.pop(generation, None)
        if slot is not None:
            index = bisect.bisect_left(self._slots, slot.offset, key=lambda each: each.offset)
            del self._slots[index]

    def _place(self, index: int, offset: int, size: int) -> Slot:
        slot = Slot(offset, size, self._next_generation)
        self._next_generation += 1
        self._slots.insert(index, slot)
        self._by_generation[slot.generation] = slot
        return slot
