"""A resource that is given back once nobody is inside it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
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

    def use(self) -> AbstractContextManager[T | None]:
        """The value, held for the length of the block; None once closed."""
        return _Use(self)

    def enter(self) -> T | None:
        """Begin to use the value, if it is not None: every such call is followed by `leave`."""
        with self._lock:
            value = None if self._closed else self._value
            if value is not None:
                self._users += 1
        return value

    def leave(self) -> None:
        """The user who entered is done."""
        with self._lock:
            self._users -= 1
            closed = self._closed
        if closed:
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


class _Use(AbstractContextManager[T | None]):
    """A class of its own, because a generator takes three times as long for every record."""

    __slots__ = ("_entered", "_held")

    def __init__(self, held: Held[T]) -> None:
        self._held = held

    def __enter__(self) -> T | None:
        value = self._held.enter()
        self._entered = value is not None
        return value

    def __exit__(self, *_: object) -> None:
        if self._entered:
            self._held.leave()
