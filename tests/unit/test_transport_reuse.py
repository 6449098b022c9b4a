"""Records that take the place of others: what is read is one of them, whole, or an error."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashduet.errors import TransportError
from flashduet.transport import records
from flashduet.transport.records import RecordHeader, RecordMemory
from flashduet.transport.tensors import DTYPES, TensorLayout
from flashduet.v1 import common_pb2 as pb
from tests.support.rings import CPU, SESSION, WIDTH, RingEnds, features_of


def test_a_reused_record_is_stale() -> None:
    pair = RingEnds(capacity=1024)
    first = pair.put(1, features_of(rows=9))
    pair.sender.release(1)
    pair.put(2, features_of(rows=9))
    with pytest.raises(TransportError) as refused:
        pair.take(first, rows=9)
    assert refused.value.reason == "STALE_GENERATION"


def test_old_records_lose_their_generation_before_a_new_payload_covers_them() -> None:
    """Small records are replaced by a large one whose payload lies over their headers."""
    pair = RingEnds(capacity=4096)
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
    pair = RingEnds(capacity=1024)
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
    pair = RingEnds(capacity=1 << 14)
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
