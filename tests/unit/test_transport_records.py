"""Sender and receiver over ring memory: what comes out is what went in, or an error."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashduet.errors import ConfigurationError, TransportError
from flashduet.transport import records
from flashduet.transport.records import RecordHeader, RecordMemory
from flashduet.transport.rings import RingReceiver, RingSender
from flashduet.transport.tensors import DTYPES, TensorLayout
from flashduet.v1 import common_pb2 as pb

CPU = torch.device("cpu")
SESSION = bytes(range(16))
OTHER = bytes(16)
WIDTH = 24


class Pair:
    """Both ends over one ordinary buffer."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.buffer = torch.zeros(capacity, dtype=torch.uint8)
        self.returned: list[str] = []
        self.sender = RingSender(
            pb.TRANSPORT_MEMFD, RecordMemory(self.buffer), lambda _: self.returned.append("sender")
        )
        self.receiver = RingReceiver(
            pb.TRANSPORT_MEMFD,
            RecordMemory(self.buffer),
            CPU,
            lambda _: self.returned.append("receiver"),
        )

    def put(self, sequence: int, features: torch.Tensor) -> pb.TensorPayload:
        payload = self.sender.put(sequence, SESSION, 0, 5, features)
        assert payload is not None
        return payload

    def take(self, payload: pb.TensorPayload, rows: int = 3, width: int = WIDTH) -> torch.Tensor:
        return self.receiver.take(SESSION, 0, 5, rows, width, payload)


def features_of(
    rows: int = 3, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(rows, width).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_arrives_in_every_dtype(dtype: torch.dtype) -> None:
    pair = Pair()
    # All bit patterns, NaNs and subnormals included: a tensor's bytes are data.
    patterns = torch.arange(-(1 << 14), 1 << 14, dtype=torch.int16).view(torch.uint8)
    sent = patterns.view(dtype).view(-1, 32)[:128].clone()
    arrived = pair.take(pair.put(1, sent), 128, 32)
    assert arrived.dtype == dtype
    assert torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8))


@pytest.mark.parametrize(
    "sent",
    [
        torch.randn(WIDTH, 3).t(),
        torch.randn(6, 2 * WIDTH)[::2, :WIDTH],
        torch.randn(1, WIDTH).expand(3, WIDTH),
        torch.randn(3, WIDTH, requires_grad=True),
    ],
    ids=["transposed", "strided", "expanded", "with_gradient"],
)
def test_strides_do_not_matter(sent: torch.Tensor) -> None:
    pair = Pair()
    assert torch.equal(pair.take(pair.put(1, sent)), sent)


@pytest.mark.parametrize(("rows", "width"), [(1, 300_001), (401, 1440), (91, 2880)])
def test_tensors_that_are_copied_in_pieces_arrive_whole(rows: int, width: int) -> None:
    pair = Pair(capacity=4 << 20)
    sent = features_of(rows, width, torch.bfloat16)
    assert torch.equal(pair.take(pair.put(1, sent), rows, width), sent)


def test_what_was_taken_is_the_callers_own() -> None:
    pair = Pair()
    sent = features_of()
    arrived = pair.take(pair.put(1, sent))
    before = arrived.clone()
    pair.buffer.fill_(255)
    sent.zero_()
    assert torch.equal(arrived, before)


def test_reading_does_not_use_a_record_up() -> None:
    pair = Pair()
    sent = features_of()
    payload = pair.put(1, sent)
    assert torch.equal(pair.take(payload), pair.take(payload))
    assert pair.sender.outstanding == 1


def _change(payload: pb.TensorPayload, **changes: int) -> pb.TensorPayload:
    changed = pb.TensorPayload()
    changed.CopyFrom(payload)
    for name, value in changes.items():
        setattr(changed.ring, name, value)
    return changed


def test_a_descriptor_out_of_range_is_refused_before_memory_is_touched() -> None:
    pair = Pair()
    payload = pair.put(1, features_of())
    size = pair.buffer.numel()
    for offset in (size, size - 64, size - 128, 2**63, 2**64 - 64, payload.ring.offset + 1):
        with pytest.raises(TransportError) as refused:
            pair.take(_change(payload, offset=offset))
        assert refused.value.reason == "OUT_OF_RANGE", offset


def test_the_last_byte_of_the_ring_is_in_range() -> None:
    pair = Pair(capacity=1024)
    sent = features_of(rows=10)
    payload = pair.put(1, sent)  # 64 + 960: exactly the ring
    assert torch.equal(pair.take(payload, rows=10), sent)
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, offset=64), rows=10)
    assert refused.value.reason == "OUT_OF_RANGE"


@pytest.mark.parametrize("generation", [0, 1, 2**63, 2**64 - 1])
def test_a_foreign_generation_is_stale(generation: int) -> None:
    pair = Pair()
    payload = pair.put(1, features_of())
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, generation=generation))
    assert refused.value.reason == "STALE_GENERATION"


def test_a_record_being_written_cannot_be_asked_for() -> None:
    pair = Pair()
    payload = pair.put(1, features_of())
    pair.buffer[payload.ring.offset :][:8] = 0  # as the writer leaves it while it copies
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, generation=0))
    assert refused.value.reason == "STALE_GENERATION"


@pytest.mark.parametrize("nbytes", [0, 3 * WIDTH * 4 - 1, 3 * WIDTH * 4 + 1, 2**64 - 1])
def test_nbytes_must_be_the_shape_times_the_item_size(nbytes: int) -> None:
    pair = Pair()
    payload = pair.put(1, features_of())
    with pytest.raises(TransportError) as refused:
        pair.take(_change(payload, nbytes=nbytes))
    assert refused.value.reason == "WRONG_SIZE"


@pytest.mark.parametrize(
    ("session", "epoch", "base"), [(OTHER, 0, 5), (SESSION, 1, 5), (SESSION, 0, 6)]
)
def test_a_record_of_another_chunk_is_not_read(session: bytes, epoch: int, base: int) -> None:
    pair = Pair()
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
    pair = Pair()
    payload = pair.put(1, features_of())
    del payload.shape[:]
    payload.shape.extend(shape)
    with pytest.raises(TransportError) as refused:
        pair.receiver.take(SESSION, 0, 5, rows, width, payload)
    assert refused.value.reason == "WRONG_SHAPE"


def test_the_header_and_the_descriptor_must_agree_on_the_shape() -> None:
    pair = Pair()
    payload = pair.put(1, features_of(rows=3, width=WIDTH))
    payload.shape[:] = [WIDTH, 3]  # the same bytes, and a caller that wants it so
    with pytest.raises(TransportError) as refused:
        pair.receiver.take(SESSION, 0, 5, WIDTH, 3, payload)
    assert refused.value.reason == "WRONG_SHAPE"


@pytest.mark.parametrize("data_type", [0, 4, 99])
def test_a_data_type_outside_the_enum_is_refused(data_type: int) -> None:
    pair = Pair()
    payload = pair.put(1, features_of())
    payload.data_type = data_type  # type: ignore[assignment]
    with pytest.raises(TransportError) as refused:
        pair.take(payload)
    assert refused.value.reason == "BAD_DATA_TYPE"


def test_float16_is_not_read_as_bfloat16() -> None:
    pair = Pair()
    payload = pair.put(1, features_of(dtype=torch.float16))
    payload.data_type = pb.DATA_TYPE_BFLOAT16
    with pytest.raises(TransportError):
        pair.take(payload)


@pytest.mark.parametrize("other", [pb.TensorPayload(inline=b"x"), pb.TensorPayload()])
def test_bytes_that_came_another_way_are_refused(other: pb.TensorPayload) -> None:
    with pytest.raises(TransportError) as refused:
        Pair().take(other)
    assert refused.value.reason == "WRONG_TRANSPORT"


def test_a_reused_record_is_stale() -> None:
    pair = Pair(capacity=1024)
    first = pair.put(1, features_of(rows=9))
    pair.sender.release(1)
    pair.put(2, features_of(rows=9))
    with pytest.raises(TransportError) as refused:
        pair.take(first, rows=9)
    assert refused.value.reason == "STALE_GENERATION"


def test_old_records_lose_their_generation_before_a_new_payload_covers_them() -> None:
    """Small records are replaced by a large one whose payload lies over their headers."""
    pair = Pair(capacity=4096)
    old = [pair.put(n, features_of(rows=1)) for n in range(4)]
    kept_headers = [pair.buffer[p.ring.offset : p.ring.offset + 64].clone() for p in old]
    for n in range(4):
        pair.sender.release(n)
    pair.put(9, torch.zeros(1, WIDTH))  # covers only the first
    for payload, header in list(zip(old, kept_headers, strict=True))[1:]:
        offset = payload.ring.offset
        assert not torch.equal(pair.buffer[offset : offset + 64], header)
        with pytest.raises(TransportError):
            pair.take(payload, rows=1)


def test_a_record_has_no_generation_while_its_bytes_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(capacity=1024)
    pair.put(1, features_of(rows=9))
    pair.sender.release(1)
    seen = []

    def watched(name: str) -> None:
        copy = getattr(records, name)

        def copy_and_look(destination: object, source: object) -> None:
            seen.append(int(pair.buffer[:8].view(torch.int64)))
            copy(destination, source)

        monkeypatch.setattr(records, name, copy_and_look)

    watched("copy_bytes")
    watched("copy_rows")
    writer = RecordMemory(pair.buffer)
    header = RecordHeader(7, SESSION, 0, 0, TensorLayout(9, WIDTH, torch.float32))
    # Over a released record, over one that was never given back, and from columns.
    for features in (features_of(rows=9), features_of(rows=9), features_of(WIDTH, 9).t()):
        writer.write(0, header, features, ())
    assert seen == [0, 0, 0]
    assert int(pair.buffer[:8].view(torch.int64)) == 7


@pytest.mark.parametrize(("writes", "reads"), [(True, False), (False, True), (True, True)])
def test_memory_that_only_torch_can_address_holds_the_same_records(
    writes: bool, reads: bool
) -> None:
    """As on a GPU: every access is torch's own."""
    buffer = torch.zeros(1 << 14, dtype=torch.uint8)
    writer, reader = RecordMemory(buffer), RecordMemory(buffer)
    for memory, far in ((writer, writes), (reader, reads)):
        if far:
            memory._host_bytes = memory._host_words = memory._host_view = None
    sent = features_of()
    header = RecordHeader(2**62 + 5, SESSION, 2**32 - 1, 7, TensorLayout(3, WIDTH, sent.dtype))
    writer.write(64, header, sent, ())
    assert torch.equal(reader.read(64, header, CPU), sent)
    assert reader.holds(64, header)
    assert (reader.lend(64, header) is None) is reads
    other = RecordHeader(2**62 + 6, SESSION, 0, 7, header.layout)
    writer.write(1024, other, sent, replaced=(64,))
    assert not reader.holds(64, header)
    with pytest.raises(TransportError) as refused:
        reader.read(64, header, CPU)
    assert refused.value.reason == "STALE_GENERATION"


def test_a_full_ring_writes_nothing_and_has_room_after_a_release() -> None:
    pair = Pair(capacity=1024)
    sent = features_of(rows=9)
    payload = pair.put(1, sent)
    before = pair.buffer.clone()
    assert pair.sender.put(2, SESSION, 0, 5, features_of(rows=9)) is None
    assert torch.equal(pair.buffer, before)
    assert pair.sender.outstanding == 1
    assert torch.equal(pair.take(payload, rows=9), sent)
    pair.sender.release(1)
    assert pair.sender.outstanding == 0
    assert pair.sender.put(2, SESSION, 0, 5, features_of(rows=9)) is not None


def test_answers_to_unknown_and_answered_chunks_do_nothing() -> None:
    pair = Pair()
    payload = pair.put(1, sent := features_of())
    pair.put(2, features_of())
    for sequence in (2, 2, 7, 0):
        pair.sender.release(sequence)
    assert pair.sender.outstanding == 1
    assert torch.equal(pair.take(payload), sent)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(list(DTYPES.values())), st.integers(0, 9)),
        max_size=60,
    )
)
def test_outstanding_chunks_keep_their_bytes_whatever_is_released_in_any_order(
    script: list[tuple[int, torch.dtype, int]],
) -> None:
    pair = Pair(capacity=1 << 14)
    live: dict[int, tuple[pb.TensorPayload, torch.Tensor]] = {}
    for sequence, (rows, dtype, victim) in enumerate(script):
        sent = features_of(rows, dtype=dtype)
        payload = pair.sender.put(sequence, SESSION, 0, 5, sent)
        if payload is not None:
            live[sequence] = (payload, sent)
        for written, original in live.values():
            arrived = pair.take(written, rows=original.shape[0])
            assert torch.equal(arrived, original)
        if victim < len(live):
            gone = list(live)[victim]
            pair.sender.release(gone)
            del live[gone]
        assert pair.sender.outstanding == len(live)


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
    pair = Pair()
    pair.put(1, features_of())
    record = pb.RingRecord(offset=offset, generation=generation, nbytes=nbytes)
    payload = pb.TensorPayload(data_type=data_type, shape=shape, ring=record)  # type: ignore[arg-type]
    with pytest.raises(TransportError):
        pair.take(payload)


def test_a_writer_that_breaks_the_protocol_gives_an_error_and_never_a_torn_tensor() -> None:
    """It overwrites one record for ever, answered or not; each version has one value."""
    rows, width = 256, 1024
    layout = TensorLayout(rows, width, torch.float32)
    buffer = torch.zeros(2 << 20, dtype=torch.uint8)
    writer, reader = RecordMemory(buffer), RecordMemory(buffer)
    stop, latest = threading.Event(), [0]

    def overwrite() -> None:
        for value in itertools.count(1):
            header = RecordHeader(value, SESSION, 0, 0, layout)
            writer.write(0, header, torch.full((rows, width), float(value)), ())
            latest[0] = value
            time.sleep(0.0002)
            if stop.is_set():
                return

    thread = threading.Thread(target=overwrite)
    thread.start()
    whole = replaced = 0
    reasons: set[str] = set()
    give_up = time.monotonic() + 240
    try:
        while (whole < 200 or replaced < 50) and time.monotonic() < give_up:
            value = latest[0]
            try:
                got = reader.read(0, RecordHeader(value, SESSION, 0, 0, layout), CPU)
            except TransportError as error:
                reasons.add(error.reason)
                replaced += value > 0
                continue
            assert bool((got == value).all())
            whole += 1
    finally:
        stop.set()
        thread.join()
    assert whole >= 200, "else the test has shown nothing"
    assert replaced >= 50
    assert reasons == {"STALE_GENERATION"}


def test_max_rows_fit_four_times_and_one_more_row_would_still_be_sent() -> None:
    pair = Pair()
    rows = pair.sender.max_rows(WIDTH, torch.float32)
    for sequence in range(4):
        pair.put(sequence, features_of(rows))
    assert pair.sender.put(4, SESSION, 0, 5, features_of(rows)) is None


def test_a_row_wider_than_a_share_of_the_ring_is_sent_alone() -> None:
    pair = Pair(capacity=1024)
    assert pair.sender.max_rows(200, torch.float32) == 1
    assert pair.sender.put(1, SESSION, 0, 5, features_of(1, 200)) is not None


def test_a_row_wider_than_the_ring_names_the_setting() -> None:
    with pytest.raises(ConfigurationError, match="ring_mib"):
        Pair(capacity=1024).sender.max_rows(250, torch.float32)


@pytest.mark.parametrize(
    ("session", "features"),
    [
        (b"short", torch.zeros(1, 4)),
        (SESSION, torch.zeros(1, 4, dtype=torch.float64)),
        (SESSION, torch.zeros(4)),
        (SESSION, torch.zeros(0, 4)),
        (SESSION, torch.zeros(99999, 4)),
    ],
)
def test_a_chunk_that_could_never_be_sent_is_a_mistake(
    session: bytes, features: torch.Tensor
) -> None:
    pair = Pair()
    with pytest.raises(ValueError, match=r"."):
        pair.sender.put(1, session, 0, 0, features)
    assert pair.sender.outstanding == 0


def test_a_sequence_number_is_used_once_at_a_time() -> None:
    pair = Pair()
    pair.put(1, features_of())
    with pytest.raises(ValueError, match="outstanding"):
        pair.put(1, features_of())


def test_closed_ends_hand_back_their_memory_once_and_do_no_work() -> None:
    pair = Pair()
    payload = pair.put(1, features_of())
    for _ in range(2):
        pair.sender.close()
        pair.receiver.close()
    assert sorted(pair.returned) == ["receiver", "sender"]
    assert pair.sender.outstanding == 0
    assert pair.sender.put(2, SESSION, 0, 5, features_of()) is None
    pair.sender.release(1)
    assert pair.receiver.closed
    with pytest.raises(TransportError):
        pair.take(payload)


def test_a_stream_that_ends_just_as_a_chunk_is_put_leaves_nothing_outstanding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    use = pair.sender._memory.use

    @contextmanager
    def use_and_lose() -> Iterator[RecordMemory | None]:
        with use() as memory:
            pair.sender.close()
            yield memory

    monkeypatch.setattr(pair.sender._memory, "use", use_and_lose)
    assert pair.sender.put(1, SESSION, 0, 5, features_of()) is None
    assert pair.sender.outstanding == 0
    assert pair.returned == ["sender"]


def test_closing_waits_with_the_memory_for_a_copy_under_way() -> None:
    pair = Pair()
    with pair.receiver._memory.use() as memory:
        pair.receiver.close()
        assert memory is not None
        assert pair.returned == []
        with pair.receiver._memory.use() as late:
            assert late is None
    assert pair.returned == ["receiver"]
