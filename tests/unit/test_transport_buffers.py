"""Buffers are used again, and never while anything still reads them."""

from __future__ import annotations

import gc

import pytest
import torch

from flashduet.transport.buffers import Buffers
from flashduet.transport.tensors import TensorLayout

LAYOUT = TensorLayout(256, 1024, torch.bfloat16)


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    buffers = Buffers(8 << 20)
    tensor = buffers.tensor(LAYOUT)
    address = tensor.data_ptr()
    part = tensor[10:20, :5].view(torch.int16)
    del tensor
    gc.collect()
    assert buffers.idle_bytes == 0, "a view still reads it"
    other = buffers.tensor(LAYOUT)
    assert other.data_ptr() != address
    part.fill_(7)
    other.fill_(1.0)
    assert (part == 7).all()
    del part
    assert buffers.idle_bytes > LAYOUT.nbytes
    assert buffers.tensor(LAYOUT).data_ptr() == address


def test_tensors_are_as_described_and_aligned() -> None:
    buffers = Buffers(8 << 20)
    for layout in (LAYOUT, TensorLayout(300, 1000, torch.float32), TensorLayout(1, 3, torch.half)):
        tensor = buffers.tensor(layout)
        assert tuple(tensor.shape) == (layout.rows, layout.width)
        assert tensor.dtype == layout.dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_no_more_is_kept_than_allowed(most: int) -> None:
    buffers = Buffers(most)
    tensors = [buffers.tensor(LAYOUT) for _ in range(5)]
    del tensors
    assert buffers.idle_bytes <= most


def test_a_small_tensor_does_not_hold_a_large_buffer() -> None:
    buffers = Buffers(64 << 20)
    large = TensorLayout(8192, 1024, torch.bfloat16)
    address = buffers.tensor(large).data_ptr()
    assert buffers.idle_bytes > large.nbytes
    assert buffers.tensor(LAYOUT).data_ptr() != address
    assert buffers.tensor(large).data_ptr() == address
