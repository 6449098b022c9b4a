"""Free block ids as runs of neighbours, so that a sequence usually gets one run. No torch here."""

from __future__ import annotations

# Left free for the one before a newcomer: enough for most answers, and little enough for memory
# to be touched from its start on.
_GROWTH = 128


class FreeRuns:
    """Ids 0..count-1, all free at first.

    Giving back and growing a run are O(1); a new place looks at every run once.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # The same runs twice: length by first id, first id by the id after the last.
        self._lengths = {0: count} if count else {}
        self._starts = {count: 0} if count else {}

    def put(self, block_id: int) -> None:
        """Give one id back; it joins the runs beside it."""
        start, end = block_id, block_id + 1
        if block_id in self._starts:
            start = self._starts.pop(block_id)
            del self._lengths[start]
        if end in self._lengths:
            length = self._lengths.pop(end)
            end += length
            del self._starts[end]
        self._add(start, end)
        self.count += 1

    def take(self, count: int, after: int | None) -> list[int]:
        """`count` ids, which must be there: first those that follow `after`, then other runs'."""
        taken: list[int] = []
        if after is not None and after + 1 in self._lengths:
            # A used id ends at `after`, so a free run can only begin behind it.
            taken += self._cut(after + 1, after + 1, count)
        while len(taken) < count:
            start = max(self._lengths, key=self._lengths.__getitem__)
            wanted = count - len(taken)
            taken += self._cut(start, self._place(start, wanted), wanted)
        return taken

    def _place(self, start: int, wanted: int) -> int:
        """Where in a run a newcomer begins: not at once, so that the one before it can grow."""
        room = self._lengths[start] - wanted
        return start if start == 0 else start + max(0, min(room // 2, _GROWTH))

    def _cut(self, start: int, first: int, count: int) -> list[int]:
        """Take up to `count` ids from `first` on out of the run that begins at `start`."""
        end = start + self._lengths.pop(start)
        del self._starts[end]
        last = min(first + count, end)
        if start < first:
            self._add(start, first)
        if last < end:
            self._add(last, end)
        self.count -= last - first
        return list(range(first, last))

    def _add(self, start: int, end: int) -> None:
        self._lengths[start] = end - start
        self._starts[end] = start
