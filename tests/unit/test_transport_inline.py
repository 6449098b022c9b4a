"""Tensor bytes in the message: exact, bounded, checked."""

from __future__ import annotations

import pytest
import torch

from flashduet.errors import ConfigurationError, TransportError
from flashduet.rpc import MAX_MESSAGE_BYTES
from flashduet.transport.inline import CHUNK_BYTES, MAX_ROW_BYTES, InlineReceiver, InlineSender
from flashduet.transport.tensors import DTYPES
from flashduet.v1 import common_pb2 as pb

SESSION = bytes(range(16))
MIB = 1 << 20


def sender(window: int = 8 * MIB) -> InlineSender:
    return InlineSender(window)


def take(payload: pb.TensorPayload, rows: int, width: int) -> torch.Tensor:
    return InlineReceiver(torch.device("cpu")).take(SESSION, 0, 0, rows, width, payload)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_arrives_through_a_serialized_message(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 14), 1 << 14, dtype=torch.int16).view(torch.uint8)
    sent = patterns.view(dtype).view(-1, 32)[:128]
    payload = sender().put(1, SESSION, 0, 0, sent)
    assert payload is not None
    received = pb.TensorPayload.FromString(payload.SerializeToString())
    arrived = take(received, 128, 32)
    assert torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8))


def test_strides_do_not_matter_and_the_copy_is_the_callers_own() -> None:
    sent = torch.randn(7, 3).t()
    payload = sender().put(1, SESSION, 0, 0, sent)
    assert payload is not None
    first = take(payload, 3, 7)
    assert torch.equal(first, sent)
    first.zero_()
    assert torch.equal(take(payload, 3, 7), sent)


@pytest.mark.parametrize("extra", [-1, 1])
def test_too_few_or_too_many_bytes_are_refused(extra: int) -> None:
    payload = sender().put(1, SESSION, 0, 0, torch.zeros(2, 3))
    assert payload is not None
    payload.inline = payload.inline[:extra] if extra < 0 else payload.inline + b"\0"
    with pytest.raises(TransportError) as refused:
        take(payload, 2, 3)
    assert refused.value.reason == "WRONG_SIZE"


def test_a_ring_record_is_refused() -> None:
    payload = pb.TensorPayload(
        data_type=pb.DATA_TYPE_FLOAT32, shape=[2, 3], ring=pb.RingRecord(nbytes=24)
    )
    with pytest.raises(TransportError) as refused:
        take(payload, 2, 3)
    assert refused.value.reason == "WRONG_TRANSPORT"


def test_unanswered_bytes_are_bounded_by_the_window() -> None:
    end = sender(window=MIB)
    chunk = torch.zeros(64, 1024)  # 256 KiB
    sent = [end.put(n, SESSION, 0, 0, chunk) for n in range(6)]
    assert [payload is not None for payload in sent] == [True] * 4 + [False] * 2
    assert end.outstanding == 4
    end.release(2)
    end.release(2)
    end.release(99)
    assert end.put(6, SESSION, 0, 0, chunk) is not None
    assert end.put(7, SESSION, 0, 0, chunk) is None


def test_max_rows_stays_under_the_message_limit_and_is_at_least_one_row() -> None:
    end = sender(window=64 * MIB)
    assert end.max_rows(1440, torch.float32) * 1440 * 4 <= CHUNK_BYTES
    assert end.max_rows(MIB, torch.float32) == 1
    assert 2 * MAX_ROW_BYTES <= MAX_MESSAGE_BYTES
    with pytest.raises(ConfigurationError, match="row"):
        end.max_rows(MAX_ROW_BYTES, torch.float32)


def test_more_rows_than_max_rows_are_a_mistake() -> None:
    end = sender(window=64 * MIB)
    rows = end.max_rows(1024, torch.float32)
    assert end.put(1, SESSION, 0, 0, torch.zeros(rows, 1024)) is not None
    with pytest.raises(ValueError, match="max_rows"):
        end.put(2, SESSION, 0, 0, torch.zeros(rows + 1, 1024))


def test_closed_ends_do_no_work() -> None:
    end, receiver = sender(), InlineReceiver(torch.device("cpu"))
    payload = end.put(1, SESSION, 0, 0, torch.zeros(2, 3))
    assert payload is not None
    end.close()
    receiver.close()
    assert end.outstanding == 0
    assert receiver.closed
    assert end.put(2, SESSION, 0, 0, torch.zeros(2, 3)) is None
    with pytest.raises(TransportError):
        receiver.take(SESSION, 0, 0, 2, 3, payload)
