"""Descriptors are not believed: whatever one says, it gives its own chunk or an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashduet.errors import TransportError
from flashduet.v1 import common_pb2 as pb
from tests.support.rings import SESSION, WIDTH, RingEnds, features_of


def _change(payload: pb.TensorPayload, **changes: int) -> pb.TensorPayload:
    changed = pb.TensorPayload()
    changed.CopyFrom(payload)
    for name, value in changes.items():
        setattr(changed.ring, name, value)
    return changed


def test_a_descriptor_out_of_range_is_refused_before_memory_is_touched() -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of())
    size = pair.buffer.numel()
    for offset in (size, size - 64, size - 128, 2**63, 2**64 - 64, payload.ring.offset + 1):
        with pytest.raises(TransportError) as refused:
            pair.take(_change(payload, offset=offset))
        assert refused.value.reason == "OUT_OF_RANGE", offset


def test_the_last_byte_of_the_ring_is_in_range() -> None:
    pair = RingEnds(capacity=1024)
    sent = features_of(rows=10)
    payload = pair.put(1, sent)  # 64 + 960: exactly the ring
    assert torch.equal(pair.take(payload, rows=10), sent)
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, offset=64), rows=10)
    assert refused.value.reason == "OUT_OF_RANGE"


@pytest.mark.parametrize("generation", [0, 1, 2**63, 2**64 - 1])
def test_a_foreign_generation_is_stale(generation: int) -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of())
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, generation=generation))
    assert refused.value.reason == "STALE_GENERATION"


def test_a_record_being_written_cannot_be_asked_for() -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of())
    pair.buffer[payload.ring.offset :][:8] = 0  # as the writer leaves it while it copies
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, generation=0))
    assert refused.value.reason == "STALE_GENERATION"


@pytest.mark.parametrize("nbytes", [0, 3 * WIDTH * 4 - 1, 3 * WIDTH * 4 + 1, 2**64 - 1])
def test_nbytes_must_be_the_shape_times_the_item_size(nbytes: int) -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of())
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, nbytes=nbytes))
    assert refused.value.reason == "WRONG_SIZE"


@pytest.mark.parametrize(
    ("session", "epoch", "base"), [(bytes(16), 0, 5), (SESSION, 1, 5), (SESSION, 0, 6)]
)
def test_a_record_of_another_chunk_is_not_read(session: bytes, epoch: int, base: int) -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of())
    with pytest.raises(TransportError) as refused:
        pair.receiver.take(session, epoch, base, 3, WIDTH, payload)
    assert refused.value.reason == "STALE_GENERATION"


@pytest.mark.parametrize(
    ("rows", "width", "shape"),
    [
        (3, WIDTH, [WIDTH, 3]),
        (3, WIDTH, [3 * WIDTH]),
        (3, WIDTH, [3, WIDTH, 1]),
        (3, WIDTH, []),
        (2, WIDTH, [3, WIDTH]),
        (0, WIDTH, [0, WIDTH]),
    ],
)
def test_a_shape_that_is_not_due_is_refused(rows: int, width: int, shape: list[int]) -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of())
    del payload.shape[:]
    payload.shape.extend(shape)
    with pytest.raises(TransportError) as refused:
        pair.receiver.take(SESSION, 0, 5, rows, width, payload)
    assert refused.value.reason == "WRONG_SHAPE"


def test_the_header_and_the_descriptor_must_agree_on_the_shape() -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of(rows=3, width=WIDTH))
    payload.shape[:] = [WIDTH, 3]  # the same bytes, and a caller that wants it so
    with pytest.raises(TransportError) as refused:
        pair.receiver.take(SESSION, 0, 5, WIDTH, 3, payload)
    assert refused.value.reason == "WRONG_SHAPE"


@pytest.mark.parametrize("data_type", [0, 4, 99])
def test_a_data_type_outside_the_enum_is_refused(data_type: int) -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of())
    payload.data_type = data_type  # type: ignore[assignment]
    with pytest.raises(TransportError) as refused:
        pair.take(payload)
    assert refused.value.reason == "BAD_DATA_TYPE"


def test_float16_is_not_read_as_bfloat16() -> None:
    pair = RingEnds()
    payload = pair.put(1, features_of(dtype=torch.float16))
    payload.data_type = pb.DATA_TYPE_BFLOAT16
    with pytest.raises(TransportError):
        pair.take(payload)


@pytest.mark.parametrize("other", [pb.TensorPayload(inline=b"x"), pb.TensorPayload()])
def test_bytes_that_came_another_way_are_refused(other: pb.TensorPayload) -> None:
    with pytest.raises(TransportError) as refused:
        RingEnds().take(other)
    assert refused.value.reason == "WRONG_TRANSPORT"


@settings(max_examples=300, deadline=None)
@given(
    offset=st.integers(0, 2**64 - 1) | st.integers(0, 1 << 16),
    generation=st.integers(0, 2**64 - 1),
    nbytes=st.integers(0, 2**64 - 1) | st.just(3 * WIDTH * 4),
    data_type=st.integers(-1, 9),
    shape=st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([3, WIDTH]), max_size=4),
)
def test_no_invented_descriptor_is_read(
    offset: int, generation: int, nbytes: int, data_type: int, shape: list[int]
) -> None:
    pair = RingEnds()
    pair.put(1, features_of())
    record = pb.RingRecord(offset=offset, generation=generation, nbytes=nbytes)
    payload = pb.TensorPayload(data_type=data_type, shape=shape, ring=record)  # type: ignore[arg-type]
    with pytest.raises(TransportError):
        pair.take(payload)
