"""A resource that is given back once nobody is inside it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """Owns `value` until `close()`; users on other threads delay the giving back, not the close.

    A stream's end closes its ring from the event loop while the engine thread may be in the middle
    of a copy; memory must not be unmapped, or leased to the next stream, under that copy.
    """

    def __init__(self, value: T, give_back: Callable[[T], None]) -> None:
        self._value: T | None = value
        # Dropped with the value: it may keep alive what the value's memory lies in.
        self._give_back: Callable[[T], None] | None = give_back
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def use(self) -> Iterator[T | None]:
        """The value, held for the length of the block; None once closed."""
        with self._lock:
            value = None if self._closed else self._value
            if value is not None:
                self._users += 1
        if value is None:
            yield None
            return
        try:
            yield value
        finally:
            with self._lock:
                self._users -= 1
            self._retire()

    def close(self) -> None:
        """No new users; given back now, or by the last user. Callable twice."""
        with self._lock:
            self._closed = True
        self._retire()

    def _retire(self) -> None:
        with self._lock:
            if not self._closed or self._users or self._value is None:
                return
            value, self._value = self._value, None
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(value)
