"""Which bytes of a ring are whose: bookkeeping only, no memory is touched here.

Records are handed out in order and given back in any order; room returns in order. A record is
never split over the ring's end. An empty ring starts over at offset 0, so that a pair that keeps up
works in the same few, cached bytes.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
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
    free: bool = False


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
        self._slots: OrderedDict[int, Slot] = OrderedDict()
        self._head = 0
        self._next_generation = secrets.randbits(62) + 1
        self._live = 0

    @property
    def live(self) -> int:
        """Records handed out and not given back."""
        return self._live

    def allocate(self, nbytes: int) -> Slot | None:
        """A new record with room for `nbytes` of payload, or None when there is no room now.

        Raises:
            ValueError: it would not fit an empty ring.
        """
        size = record_size(nbytes)
        if size > self.capacity:
            raise ValueError(f"a record of {size} bytes in a ring of {self.capacity}")
        offset = self._place(size)
        if offset is None:
            return None
        slot = Slot(offset, size, self._next_generation)
        self._next_generation += 1
        self._head = offset + size
        self._slots[slot.generation] = slot
        self._live += 1
        return slot

    def free(self, generation: int) -> None:
        """Give a record back. Unknown and repeated generations do nothing."""
        slot = self._slots.get(generation)
        if slot is None or slot.free:
            return
        slot.free = True
        self._live -= 1
        while self._slots:
            oldest = next(iter(self._slots.values()))
            if not oldest.free:
                break
            del self._slots[oldest.generation]

    def _place(self, size: int) -> int | None:
        if not self._slots:
            return 0
        tail = next(iter(self._slots.values())).offset
        if self._head <= tail:  # wrapped: the room is between head and tail, none if they meet
            return self._head if tail - self._head >= size else None
        if self.capacity - self._head >= size:
            return self._head
        return 0 if tail >= size else None
