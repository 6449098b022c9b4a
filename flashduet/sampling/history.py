"""Which tokens a session has, counted as they are committed. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class TokenHistory:
    """How often prompt and answer have each token; one per session whose sampling needs it.

    Only committed tokens go in, so a rejected block needs no undoing. Adding a token is constant
    work, and reading is a view: nothing is counted again.

    Args:
        prompt_length: tokens at positions below it are the prompt's, all others the answer's.
        token_ids: of positions 0, 1, ...
    """

    __slots__ = ("_answer", "_ids", "_prompt_length", "_slots", "_token_ids", "_total")

    def __init__(self, prompt_length: int, token_ids: Sequence[int] = ()) -> None:
        self._prompt_length = prompt_length
        self._token_ids: list[int] = []
        # Token id to its place in the three arrays, of which the first len(_slots) entries count.
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._total = np.zeros(64, dtype=np.int64)
        self._answer = np.zeros(64, dtype=np.int64)
        self.extend(token_ids)

    def __len__(self) -> int:
        """Positions known."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Each token id once, in order of first appearance. A view, valid until the next change."""
        return self._ids[: len(self._slots)]

    @property
    def total_counts(self) -> Counts:
        """Of `token_ids`: how often prompt and answer have it. A view."""
        return self._total[: len(self._slots)]

    @property
    def answer_counts(self) -> Counts:
        """Of `token_ids`: how often the answer alone has it. A view."""
        return self._answer[: len(self._slots)]

    def slot(self, token_id: int) -> int | None:
        """Where in the three views a token stands; None if it never appeared."""
        return self._slots.get(token_id)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of the next positions."""
        for token_id in token_ids:
            self._count(token_id, len(self._token_ids), 1)
            self._token_ids.append(token_id)

    def truncate(self, length: int) -> None:
        """Forget the tokens of positions `length` and above.

        Raises:
            ValueError: fewer than that are known.
        """
        if not 0 <= length <= len(self._token_ids):
            raise ValueError(f"length {length} of a history of {len(self._token_ids)} tokens")
        while len(self._token_ids) > length:
            token_id = self._token_ids.pop()
            self._count(token_id, len(self._token_ids), -1)

    def _count(self, token_id: int, position: int, by: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            # By doubling, so that adding stays constant work on average.
            self._ids, self._total, self._answer = (
                np.concatenate([array, np.zeros_like(array)])
                for array in (self._ids, self._total, self._answer)
            )
        self._ids[slot] = token_id
        self._total[slot] += by
        if position >= self._prompt_length:
            self._answer[slot] += by
