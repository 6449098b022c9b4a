"""What a request adds to the logits of chosen token ids. No torch here."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_TOKEN_ID = 2**32 - 1


class LogitBias(Mapping[int, float]):
    """Token id to bias, ids ascending; never changes, so it can be hashed and shared.

    Values are rounded to float32, which is what the wire carries: a bias that has travelled equals
    the one that was sent.

    Raises:
        ValueError: an id or a value is outside its limits, or there are too many; says which.
    """

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[int, float]) -> None:
        if not isinstance(values, Mapping):
            raise ValueError("must map token ids to numbers")
        if len(values) > MAX_BIASED_TOKENS:
            raise ValueError(f"must have at most {MAX_BIASED_TOKENS} entries")
        for token_id, bias in values.items():
            if not _is(token_id, int) or not 0 <= token_id <= MAX_TOKEN_ID:
                raise ValueError("must have token ids, whole numbers from 0, as keys")
            if not _is(bias, int | float) or not abs(bias) <= MAX_BIAS:  # NaN fails this too
                raise ValueError(
                    f"must have values from {-MAX_BIAS:g} to {MAX_BIAS:g}; that of token "
                    f"{token_id} is {bias!r}"
                )
        ordered = sorted(values)
        rounded = struct.pack(f"{len(ordered)}f", *(values[token_id] for token_id in ordered))
        self._values = dict(zip(ordered, struct.unpack(f"{len(ordered)}f", rounded), strict=True))
        self._hash = hash(tuple(self._values.items()))

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._values)


def _is(value: object, kinds: type | object) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)  # type: ignore[arg-type]


NO_BIAS = LogitBias({})
