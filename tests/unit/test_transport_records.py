"""Sender and receiver over ring memory: what goes in comes out, while there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from flashduet.errors import ConfigurationError, TransportError
from flashduet.transport.records import RecordMemory
from flashduet.transport.tensors import DTYPES
from tests.support.rings import SESSION, WIDTH, RingEnds, features_of


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_arrives_in_every_dtype(dtype: torch.dtype) -> None:
    pair = RingEnds()
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
    pair = RingEnds()
    assert torch.equal(pair.take(pair.put(1, sent)), sent)


@pytest.mark.parametrize(("rows", "width"), [(1, 300_001), (401, 1440), (91, 2880)])
def test_tensors_that_are_copied_in_pieces_arrive_whole(rows: int, width: int) -> None:
    pair = RingEnds(capacity=4 << 20)
    sent = features_of(rows, width, torch.bfloat16)
    assert torch.equal(pair.take(pair.put(1, sent), rows, width), sent)


def test_what_was_taken_is_the_callers_own() -> None:
    pair = RingEnds()
    sent = features_of()
    arrived = pair.take(pair.put(1, sent))
    before = arrived.clone()
    pair.buffer.fill_(255)
    sent.zero_()
    assert torch.equal(arrived, before)


def test_reading_does_not_use_a_record_up() -> None:
    pair = RingEnds()
    sent = features_of()
    payload = pair.put(1, sent)
    assert torch.equal(pair.take(payload), pair.take(payload))
    assert pair.sender.outstanding == 1


def test_a_full_ring_writes_nothing_and_has_room_after_a_release() -> None:
    pair = RingEnds(capacity=1024)
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
    pair = RingEnds()
    payload = pair.put(1, sent := features_of())
    pair.put(2, features_of())
    for sequence in (2, 2, 7, 0):
        pair.sender.release(sequence)
    assert pair.sender.outstanding == 1
    assert torch.equal(pair.take(payload), sent)


def test_max_rows_fit_four_times_and_one_more_row_would_still_be_sent() -> None:
    pair = RingEnds()
    rows = pair.sender.max_rows(WIDTH, torch.float32)
    for sequence in range(4):
        pair.put(sequence, features_of(rows))
    assert pair.sender.put(4, SESSION, 0, 5, features_of(rows)) is None


def test_a_row_wider_than_a_share_of_the_ring_is_sent_alone() -> None:
    pair = RingEnds(capacity=1024)
    assert pair.sender.max_rows(200, torch.float32) == 1
    assert pair.sender.put(1, SESSION, 0, 5, features_of(1, 200)) is not None


def test_a_row_wider_than_the_ring_names_the_setting() -> None:
    with pytest.raises(ConfigurationError, match="ring_mib"):
        RingEnds(capacity=1024).sender.max_rows(250, torch.float32)


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
    pair = RingEnds()
    with pytest.raises(ValueError, match=r"."):
        pair.sender.put(1, session, 0, 0, features)
    assert pair.sender.outstanding == 0


def test_a_sequence_number_is_used_once_at_a_time() -> None:
    pair = RingEnds()
    pair.put(1, features_of())
    with pytest.raises(ValueError, match="outstanding"):
        pair.put(1, features_of())


def test_closed_ends_hand_back_their_memory_once_and_do_no_work() -> None:
    pair = RingEnds()
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
    pair = RingEnds()
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
    pair = RingEnds()
    with pair.receiver._memory.use() as memory:
        pair.receiver.close()
        assert memory is not None
        assert pair.returned == []
        with pair.receiver._memory.use() as late:
            assert late is None
    assert pair.returned == ["receiver"]
