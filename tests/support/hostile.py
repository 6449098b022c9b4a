"""Random messages of any type: each field absent, ordinary, or at the edge of what it can hold."""

from __future__ import annotations

import random
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_EDGES: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, 5, 8, 319, 320, 2**31, 2**32 - 1],
    FieldDescriptor.CPPTYPE_INT64: [0, 1, -1, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 64, 2**32, 2**63, 2**64 - 1],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, 1.0, -1.0, 0.5, 1e308, float("nan"), float("inf")],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, 1.0, -1.0, 0.5, 1e38, float("nan"), float("inf")],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
}
_STRINGS = ["", "a", "user", "00-" + "f" * 32 + "-" + "f" * 16 + "-01", "\0", "é" * 300, "<|mask|>"]
_BYTES = [b"", b"\0" * 15, b"\0" * 16, b"\xff" * 16, b"\xff" * 17, b"x" * 4096]


class Hostile:
    """A stream of messages that is the same for the same seed."""

    def __init__(self, seed: int, known_ids: list[bytes]) -> None:
        """`known_ids`: ids that mean something to the peer, and are used now and then."""
        self._random = random.Random(seed)
        self._bytes = _BYTES + known_ids * 2

    def message(self, kind: type[M], depth: int = 0) -> M:
        """A random message of a type."""
        made = kind()
        for field in made.DESCRIPTOR.fields:
            if field.containing_oneof is None and self._random.random() < 0.8:
                self._fill(made, field, depth)
        for oneof in made.DESCRIPTOR.oneofs:
            if self._random.random() < 0.9:
                self._fill(made, self._random.choice(oneof.fields), depth)
        return made

    def mutated(self, message: M) -> M:
        """A copy with one field of it, or of a message within, replaced or taken away."""
        made = type(message)()
        made.CopyFrom(message)
        where: Message = made
        while True:
            inner = [
                value
                for field, value in where.ListFields()
                if field.message_type is not None and not field.is_repeated
            ]
            if not inner or self._random.random() < 0.3:
                break
            where = self._random.choice(inner)
        if where.DESCRIPTOR.fields:
            field = self._random.choice(where.DESCRIPTOR.fields)
            where.ClearField(field.name)
            if self._random.random() < 0.8:
                self._fill(where, field, 0)
        return made

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._fill_map(getattr(message, field.name), field.message_type, depth)
        elif field.message_type is not None:
            kind = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(self._random.choice([0, 1, 3])):
                    kind.add().CopyFrom(self.message(field.message_type._concrete_class, depth + 1))
            else:
                kind.CopyFrom(self.message(field.message_type._concrete_class, depth + 1))
                kind.SetInParent()
        elif field.is_repeated:
            count = self._random.choice([0, 1, 2, 7, 40, 600])
            getattr(message, field.name).extend(self._value(field) for _ in range(count))
        else:
            setattr(message, field.name, self._value(field))

    def _fill_map(self, mapping: Any, entry: Descriptor, depth: int) -> None:
        value = entry.fields_by_name["value"]
        for _ in range(self._random.choice([0, 1, 2, 40] if depth == 1 else [0, 1])):
            key = self._value(entry.fields_by_name["key"])
            if value.message_type is not None:
                kind = value.message_type._concrete_class
                mapping[key].CopyFrom(self.message(kind, depth + 1))
            else:
                mapping[key] = self._value(value)

    def _value(self, field: FieldDescriptor) -> Any:
        if field.enum_type is not None:
            numbers = [value.number for value in field.enum_type.values]
            return self._random.choice([*numbers, 77])
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._random.choice(_STRINGS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._random.choice(self._bytes)
        return self._random.choice(_EDGES[field.cpp_type])
