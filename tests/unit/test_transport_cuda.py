"""cuda_ipc: leases, handles and sizes, over CPU memory; with a GPU, the driver itself."""

from __future__ import annotations

import secrets
import subprocess
import sys

import pytest
import torch

from flashduet.errors import TransportError
from flashduet.transport.cuda_driver import CudaDriver
from flashduet.transport.cuda_ipc import CudaIpcSender, DeviceRings, open_receiver, why_unavailable
from flashduet.v1 import common_pb2 as pb

CPU = torch.device("cpu")
SIZE = 1 << 18
SESSION = bytes(range(16))


class HostMemory:
    """`DeviceMemory` in host memory: handles name buffers of this process."""

    def __init__(self) -> None:
        self.buffers: dict[bytes, torch.Tensor] = {}
        self.open_count = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def export(self, buffer: torch.Tensor) -> bytes:
        handle = secrets.token_bytes(64)
        self.buffers[handle] = buffer
        return handle

    def open(self, handle: bytes) -> torch.Tensor:
        if handle not in self.buffers:
            raise TransportError("WRONG_TRANSPORT", "unknown handle")
        self.open_count += 1
        return self.buffers[handle]

    def close(self, buffer: torch.Tensor) -> None:
        self.open_count -= 1


def test_a_tensor_goes_through_a_leased_ring() -> None:
    memory = HostMemory()
    rings = DeviceRings(memory)
    sender = CudaIpcSender(SIZE, rings)
    receiver = open_receiver(sender.device_handle, sender.ring_bytes, CPU, memory)
    sent = torch.randn(9, 33).bfloat16()
    payload = sender.put(1, SESSION, 0, 0, sent)
    assert payload is not None
    assert torch.equal(receiver.take(SESSION, 0, 0, 9, 33, payload), sent)
    assert sender.transport == receiver.transport == pb.TRANSPORT_CUDA_IPC
    receiver.close()
    receiver.close()
    assert memory.open_count == 0


def test_streams_reuse_one_ring_and_two_at_once_have_two() -> None:
    rings = DeviceRings(HostMemory())
    handles = set()
    for _ in range(5):
        sender = CudaIpcSender(SIZE, rings)
        handles.add(sender.device_handle)
        sender.close()
        sender.close()
    assert len(handles) == 1
    first, second = CudaIpcSender(SIZE, rings), CudaIpcSender(SIZE, rings)
    assert first.device_handle != second.device_handle
    assert rings.allocated == 2
    assert CudaIpcSender(4 * SIZE, rings).ring_bytes >= 4 * SIZE


def test_a_late_reader_of_an_earlier_lease_sees_nothing_of_the_next() -> None:
    memory = HostMemory()
    rings = DeviceRings(memory)
    sender = CudaIpcSender(SIZE, rings)
    late = open_receiver(sender.device_handle, sender.ring_bytes, CPU, memory)
    old = sender.put(1, SESSION, 0, 0, torch.zeros(2, 8))
    assert old is not None
    sender.close()
    following = CudaIpcSender(SIZE, rings)
    assert following.put(1, SESSION, 0, 0, torch.ones(2, 8)) is not None
    with pytest.raises(TransportError) as refused:
        late.take(SESSION, 0, 0, 2, 8, old)
    assert refused.value.reason == "STALE_GENERATION"


def test_a_ring_is_not_leased_again_while_its_last_chunk_is_being_written() -> None:
    rings = DeviceRings(HostMemory())
    sender = CudaIpcSender(SIZE, rings)
    with sender._memory.use():
        sender.close()
        assert CudaIpcSender(SIZE, rings).device_handle != sender.device_handle
    assert CudaIpcSender(SIZE, rings).device_handle == sender.device_handle


@pytest.mark.parametrize("announced", [0, 1, SIZE + 1, 2**63])
def test_the_announced_size_must_be_inside_what_the_driver_mapped(announced: int) -> None:
    memory = HostMemory()
    sender = CudaIpcSender(SIZE, DeviceRings(memory))
    with pytest.raises(TransportError) as refused:
        open_receiver(sender.device_handle, announced, CPU, memory)
    assert refused.value.reason == "WRONG_SIZE"
    assert memory.open_count == 0


def test_an_unknown_handle_is_refused() -> None:
    with pytest.raises(TransportError):
        open_receiver(bytes(64), SIZE, CPU, HostMemory())


def test_the_reason_why_it_is_unavailable_is_said() -> None:
    assert why_unavailable(CPU) == "the device is cpu, not a GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_driver_is_not_looked_for() -> None:
    with pytest.raises(TransportError, match="no CUDA device"):
        CudaDriver(torch.device("cuda:0"))


_CHILD = """
import sys, torch
from flashduet.transport.cuda_driver import CudaDriver
from flashduet.transport.cuda_ipc import open_receiver
from flashduet.v1 import common_pb2 as pb
device = torch.device("cuda:0")
handle, nbytes, payload = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
receiver = open_receiver(handle, nbytes, device, CudaDriver(device))
got = receiver.take(bytes(range(16)), 0, 0, 9, 32, pb.TensorPayload.FromString(payload))
print(float(got.double().sum()))
receiver.close()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_reads_the_ring_on_the_gpu() -> None:
    device = torch.device("cuda:0")
    sender = CudaIpcSender(SIZE, DeviceRings(CudaDriver(device)))
    sent = torch.arange(9 * 32, device=device, dtype=torch.float32).view(9, 32)
    payload = sender.put(1, SESSION, 0, 0, sent)
    assert payload is not None
    arguments = [sender.device_handle.hex(), str(sender.ring_bytes)]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments, payload.SerializeToString().hex()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert float(done.stdout) == float(sent.double().sum())
    sender.close()
