"""Lent records: read where they lie, and kept as long as somebody looks at them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashduet.errors import TransportError
from flashduet.transport import loans
from flashduet.transport.base import Loan
from flashduet.transport.inline import InlineReceiver, InlineSender
from flashduet.transport.loans import LEAST_LENT_BYTES, LENT_SHARE
from flashduet.transport.memfd import MemfdSender, open_receiver
from flashduet.v1 import common_pb2 as pb
from tests.support.rings import CPU, SESSION, mappings

WIDTH = 1024
ROWS = LEAST_LENT_BYTES // (WIDTH * 2)  # of bfloat16: just enough
ROOM = 8  # loans of ROWS at a time
RING_BYTES = LENT_SHARE * ROOM * LEAST_LENT_BYTES


class Pair:
    """Both ends of one memfd, in this process."""

    def __init__(self, ring_bytes: int = RING_BYTES) -> None:
        self.sender = MemfdSender(ring_bytes, CPU)
        self.receiver = open_receiver(self.sender.descriptor, self.sender.ring_bytes, CPU)
        self.sender.close_descriptor()

    def put(self, sequence: int, features: torch.Tensor) -> pb.TensorPayload:
        payload = self.sender.put(sequence, SESSION, 0, 5, features)
        assert payload is not None
        return payload

    def lend(self, sequence: int, payload: pb.TensorPayload, rows: int = ROWS) -> Loan | None:
        return self.receiver.lend(sequence, SESSION, 0, 5, rows, WIDTH, payload)

    def lent(self, sequence: int, features: torch.Tensor) -> Loan:
        """Put and lent at once."""
        loan = self.lend(sequence, self.put(sequence, features), len(features))
        assert loan is not None
        return loan

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def features_of(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH).bfloat16()


def test_a_loan_is_the_ring_s_own_memory(pair: Pair) -> None:
    sent = features_of()
    loan = pair.lent(1, sent)
    assert torch.equal(loan.features, sent)
    assert loan.features.is_contiguous()
    assert loan.features.data_ptr() % 64 == 0
    # The owner's writes are seen, as no copy would see them.
    memory = pair.sender._memory._value
    assert memory is not None
    memory._bytes.fill_(0)
    assert not loan.features.any()


def test_a_record_comes_back_with_the_last_view_of_its_tensor(pair: Pair) -> None:
    loan = pair.lent(7, features_of())
    part = loan.features[3:5, :9].float(), loan.features[3:5, :9].view(torch.int16)
    assert pair.receiver.returned() == []
    del loan
    gc.collect()
    assert pair.receiver.returned() == []
    assert pair.receiver.lent == 1
    del part
    assert pair.receiver.lent == 1, "nobody has been told"
    assert pair.receiver.returned() == [7]
    assert pair.receiver.returned() == []
    assert pair.receiver.lent == 0


def test_small_chunks_are_not_lent(pair: Pair) -> None:
    rows = ROWS - 1
    assert pair.lend(1, pair.put(1, features_of(rows)), rows) is None
    assert pair.receiver.lent == 0


def test_a_reader_that_keeps_its_tensors_leaves_the_rest_of_the_ring(pair: Pair) -> None:
    kept = [pair.lent(n, features_of()) for n in range(ROOM)]
    payload = pair.put(99, sent := features_of())
    assert pair.lend(99, payload) is None
    assert torch.equal(pair.receiver.take(SESSION, 0, 5, ROWS, WIDTH, payload), sent)
    pair.sender.release(99)
    # What is not lent goes round and round in what is left.
    for n in range(100, 200):
        pair.put(n, sent)
        pair.sender.release(n)
    del kept[3]
    assert pair.lend(200, payload := pair.put(200, sent)) is None, "its end was not yet collected"
    assert pair.receiver.returned() == [3]
    assert pair.lend(200, payload) is not None


def test_a_chunk_is_lent_once_at_a_time(pair: Pair) -> None:
    payload = pair.put(1, features_of())
    first = pair.lend(1, payload)
    assert first is not None
    assert pair.lend(1, payload) is None


def test_everything_is_checked_before_a_record_is_lent(pair: Pair) -> None:
    payload = pair.put(1, features_of())
    for field, wrong, reason in (
        ("generation", 1, "STALE_GENERATION"),
        ("offset", 1 << 40, "OUT_OF_RANGE"),
        ("nbytes", 64, "WRONG_SIZE"),
    ):
        changed = pb.TensorPayload()
        changed.CopyFrom(payload)
        setattr(changed.ring, field, wrong)
        with pytest.raises(TransportError) as refused:
            pair.lend(1, changed)
        assert refused.value.reason == reason
    with pytest.raises(TransportError):
        pair.receiver.lend(1, bytes(16), 0, 5, ROWS, WIDTH, payload)
    with pytest.raises(TransportError):
        pair.receiver.lend(1, SESSION, 1, 5, ROWS, WIDTH, payload)
    assert pair.receiver.lent == 0
    pair.receiver.close()
    with pytest.raises(TransportError):
        pair.lend(1, payload)


def test_a_record_that_was_replaced_under_its_reader_is_told_from_one_that_was_not(
    pair: Pair,
) -> None:
    kept, replaced = pair.lent(1, features_of()), pair.lent(2, features_of())
    assert kept.intact()
    assert replaced.intact()
    pair.sender.release(2)  # which nobody has asked for
    assert replaced.intact(), "its bytes are still there"
    pair.put(3, features_of())
    assert not replaced.intact()
    assert kept.intact()


def test_a_loan_outlives_both_ends_and_their_mappings(pair: Pair) -> None:
    before = mappings()
    own = Pair()
    sent = features_of()
    loan = own.lent(1, sent)
    own.close()
    del own
    gc.collect()
    assert mappings() == before + 1
    assert torch.equal(loan.features, sent)
    assert loan.intact()
    del loan
    gc.collect()
    assert mappings() == before


def test_bytes_in_a_message_are_never_lent() -> None:
    payload = InlineSender(1 << 22).put(1, SESSION, 0, 5, features_of())
    assert payload is not None
    receiver = InlineReceiver(CPU)
    assert receiver.lend(1, SESSION, 0, 5, ROWS, WIDTH, payload) is None
    assert (receiver.lent, receiver.returned()) == (0, [])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.integers(0, 9)), max_size=60))
def test_lent_and_copied_chunks_keep_their_bytes_whatever_goes_in_any_order(
    script: list[tuple[int, bool, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loans, "LEAST_LENT_BYTES", 1)
        pair = Pair(1 << 18)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        for sequence, (rows, lend, victim) in enumerate(script):
            sent = features_of(rows)
            payload = pair.sender.put(sequence, SESSION, 0, 5, sent)
            if payload is not None:
                loan = pair.lend(sequence, payload, rows) if lend else None
                if loan is None:
                    taken = pair.receiver.take(SESSION, 0, 5, rows, WIDTH, payload)
                    pair.sender.release(sequence)
                else:
                    taken = loan.features
                held.append((taken, sent))
                del taken, loan
            if victim < len(held):
                del held[victim]
            for released in pair.receiver.returned():
                pair.sender.release(released)
            assert pair.sender.outstanding == pair.receiver.lent
            for arrived, original in held:
                assert torch.equal(arrived, original)
        del held
        pair.close()
