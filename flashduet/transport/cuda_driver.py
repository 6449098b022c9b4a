"""Device memory that another process can open: the few CUDA driver calls that torch does not have.

torch's own sharing goes through a named shared-memory file and its caching allocator (expandable
segments cannot be exported); memory from the driver has neither, and is freed by nobody else.
Importable anywhere; the library is looked for when a `CudaDriver` is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from flashduet.errors import TransportError
from flashduet.transport.rendezvous import HANDLE_BYTES

# Smaller allocations may share a block with others, and a handle exports the whole block.
GRANULE_BYTES = 2 * 1024 * 1024
_LAZY_ENABLE_PEER_ACCESS = 1


class DeviceMemory(Protocol):
    """What cuda_ipc needs of a device. All raise TransportError when the device refuses."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [>= nbytes], zeroed, never freed before the process ends."""

    def export(self, buffer: torch.Tensor) -> bytes:
        """The 64-byte IPC handle of an allocated buffer."""

    def open(self, handle: bytes) -> torch.Tensor:
        """uint8 over the whole of another process's exported buffer."""

    def close(self, buffer: torch.Tensor) -> None:
        """Unmap an opened buffer; no tensor over it may be used any more."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _DeviceArray:
    """Device memory as torch takes it in, without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CudaDriver:
    """`DeviceMemory` of one GPU, in torch's own (primary) context."""

    def __init__(self, device: torch.device) -> None:
        """Raises TransportError when there is no such GPU or no driver."""
        if not torch.cuda.is_available():
            raise TransportError("WRONG_TRANSPORT", "no CUDA device can be used by this process")
        self._index = torch.cuda.current_device() if device.index is None else device.index
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError("WRONG_TRANSPORT", "the CUDA driver is not installed") from error
        self._call("cuInit", ctypes.c_uint(0))
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(self._index))
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def allocate(self, nbytes: int) -> torch.Tensor:
        nbytes = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        pointer = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return self._tensor(pointer.value, nbytes).zero_()

    def export(self, buffer: torch.Tensor) -> bytes:
        handle = _IpcHandle()
        with self._current():
            pointer = ctypes.c_uint64(buffer.data_ptr())
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> torch.Tensor:
        if len(handle) != HANDLE_BYTES:
            raise TransportError("WRONG_TRANSPORT", "a CUDA IPC handle of the wrong length")
        opened, start, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(opened),
                _IpcHandle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
            )
            try:
                # The size is the driver's word, not the peer's.
                self._call(
                    "cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), opened
                )
                return self._tensor(opened.value, start.value + size.value - opened.value)
            except BaseException:
                self._call("cuIpcCloseMemHandle", opened)
                raise

    def close(self, buffer: torch.Tensor) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(buffer.data_ptr()))

    def _tensor(self, pointer: int, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(self._index):
            tensor = torch.as_tensor(_DeviceArray(pointer, nbytes))
        if not tensor.is_cuda or tensor.data_ptr() != pointer:
            raise TransportError("WRONG_TRANSPORT", "torch copied device memory it was to map")
        return tensor

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The context is per thread, and loop and engine are two."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise TransportError("WRONG_TRANSPORT", f"{name} failed with CUDA error {status}")
