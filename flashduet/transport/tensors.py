"""Tensors on the wire: element types from an enum, row-major little-endian bytes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flashduet.errors import TransportError
from flashduet.transport.base import SESSION_ID_BYTES
from flashduet.v1 import common_pb2 as pb

DTYPES: dict[pb.DataType, torch.dtype] = {
    pb.DATA_TYPE_FLOAT32: torch.float32,
    pb.DATA_TYPE_FLOAT16: torch.float16,
    pb.DATA_TYPE_BFLOAT16: torch.bfloat16,
}
DATA_TYPES: dict[torch.dtype, pb.DataType] = {dtype: number for number, dtype in DTYPES.items()}
# Copies between CPU tensors are cut to this: half of a usual second-level cache.
_PIECE_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A checked [rows, width] tensor of `dtype`; `nbytes` is what it occupies."""

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize


def layout_to_send(features: torch.Tensor, session_id: bytes) -> TensorLayout:
    """The layout of a chunk that is about to be sent.

    Raises:
        ValueError: it is not a [rows >= 1, width >= 1] tensor of a dtype that crosses the wire,
            or the session id is not 16 bytes long.
    """
    if len(session_id) != SESSION_ID_BYTES:
        raise ValueError(f"a session id has {SESSION_ID_BYTES} bytes, not {len(session_id)}")
    if features.dtype not in DATA_TYPES:
        raise ValueError(f"features are {features.dtype}, not float32, float16 or bfloat16")
    if features.dim() != 2 or features.numel() == 0:
        raise ValueError(f"features have the shape {list(features.shape)}, not [rows, width]")
    rows, width = features.shape
    return TensorLayout(rows, width, features.dtype)


def layout_of_payload(
    payload: pb.TensorPayload, storage: str, rows: int, width: int
) -> TensorLayout:
    """The layout of a received chunk, once its description fits what is expected.

    Args:
        storage: `ring` or `inline`: the field that must hold (or describe) the bytes.

    Raises:
        TransportError: WRONG_TRANSPORT, BAD_DATA_TYPE, WRONG_SHAPE.
    """
    found = payload.WhichOneof("storage")
    if found != storage:
        raise TransportError(
            "WRONG_TRANSPORT", f"a tensor came as {found}, this stream carries {storage}"
        )
    dtype = DTYPES.get(payload.data_type)
    if dtype is None:
        raise TransportError("BAD_DATA_TYPE", f"data type {payload.data_type} is not known")
    if rows < 1 or width < 1 or list(payload.shape) != [rows, width]:
        raise TransportError(
            "WRONG_SHAPE", f"shape {list(payload.shape)[:8]} came, [{rows}, {width}] is due"
        )
    return TensorLayout(rows, width, dtype)


def require_nbytes(found: int, layout: TensorLayout) -> None:
    """Raises TransportError WRONG_SIZE unless `found` is exactly what the layout occupies."""
    if found != layout.nbytes:
        raise TransportError("WRONG_SIZE", f"{found} bytes came, {layout.nbytes} are due")


def describe(layout: TensorLayout) -> pb.TensorPayload:
    """A TensorPayload with everything but its storage."""
    return pb.TensorPayload(data_type=DATA_TYPES[layout.dtype], shape=[layout.rows, layout.width])


def copy_rows(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy [rows, width] into a contiguous tensor of the same shape and dtype, on any devices."""
    into, out_of = rows_of_bytes(destination), rows_of_bytes(source)
    if into is None or out_of is None:
        destination.copy_(source.detach())
    else:
        copy_bytes(into, out_of)


def rows_of_bytes(features: torch.Tensor) -> npt.NDArray[np.uint8] | None:
    """The memory of a [rows, width] tensor, row by row; None where it is not the CPU's, or a row
    is not in one piece. As bytes, because numpy knows no bfloat16."""
    if not features.is_cpu or features.stride(1) != 1:
        return None
    if features.requires_grad:
        features = features.detach()
    return features.view(torch.uint8).numpy()


def copy_bytes(into: npt.NDArray[np.uint8], out_of: npt.NDArray[np.uint8]) -> None:
    """Copy rows of bytes, in this thread alone and at memory speed.

    torch would split it over its OpenMP pool and wait for threads that the neighbours on the
    machine have displaced: with both cores busy that took 7.3 ms for 11.8 MB instead of 0.3 ms. It
    goes piece by piece, because the C library copies what is larger than a cache in another way,
    past it, and the other side reads the bytes next: two processes that hand over 11.8 MB so take
    0.7 ms instead of 1.1.
    """
    rows = max(1, _PIECE_BYTES // into.shape[1])
    for first in range(0, len(into), rows):
        np.copyto(into[first : first + rows], out_of[first : first + rows])


def view_of_buffer(buffer: object, *, read_only: bool = False) -> torch.Tensor:
    """A uint8 tensor over `buffer`'s memory, which it keeps alive.

    torch holds a reference but no buffer export, so closing an mmap under such a view is a crash:
    mappings here are never closed, they go when their last view does.
    """
    if not read_only:
        return torch.frombuffer(buffer, dtype=torch.uint8)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # "The given buffer is not writable": nothing here writes to a read-only view.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(buffer, dtype=torch.uint8)  # type: ignore[arg-type]
