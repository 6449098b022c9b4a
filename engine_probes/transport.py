"""Features from one process's tensor to another's, beside a plain copy of the same bytes.

The producer stands for the target and starts the consumer, which stands for the draft. The ring is
made and handed over by the code that the services use. Descriptors and acks go over a socket, one
message each, as they go over the Ingest stream in the services; an ack also names the records whose
tensors the consumer has let go.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from engine_probes.serve import serve
from flashduet.transport.negotiation import Receivers, open_sender
from flashduet.transport.options import TransportOptions
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2

_SESSION = bytes(16)
_RING_BYTES = 64 << 20
# Chunks not yet acknowledged; the ring holds more.
_WINDOW = 8
_TIMEOUT_S = 60.0
_LARGEST_MESSAGE = 4096
# Before a chunk's descriptor: its sequence, first row, rows, whether it may be lent, and whether
# the consumer is to stay awake for the next.
_CHUNK = struct.Struct("<QII??")
# Longer than a chunk takes.
_AWAKE_S = 200e-6
# An answer: the chunk's sequence, whether it is lent, and then those that are not any more.
_ACK = struct.Struct("<Q?")
_RELEASED = struct.Struct("<Q")


class Producer:
    """Owns the sender, its tensor, and the consumer's process."""

    def start(self, rows: int, width: int, chunk_rows: int) -> str:
        """Make the tensor [rows, width] bfloat16, the ring and the consumer."""
        torch.set_num_threads(1)
        self._features = torch.randn(rows, width).bfloat16()
        self._chunks = self._features.split(chunk_rows)
        self._sequence = 0
        self._folder = tempfile.TemporaryDirectory(prefix="flashduet-")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # In the kernel: Python's own timeout asks it twice for every message.
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("@ll", int(_TIMEOUT_S), 0))
        instance = os.urandom(16)
        command = [sys.executable, "-m", "engine_probes.transport", "consumer", self._folder.name]
        self._consumer = subprocess.Popen(
            [*command, instance.hex(), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._socket = ours
        _receive(ours)  # it listens
        options = TransportOptions("memfd", "cpu", Path(self._folder.name), _RING_BYTES)
        self._sender, attach = asyncio.run(open_sender([pb.TRANSPORT_MEMFD], instance, options))
        _send(ours, attach.SerializeToString())
        _receive(ours)  # it has mapped the ring
        return "memfd"

    def memcpy(self, repeats: int) -> list[float]:
        """Seconds of copying the tensor into another one in this process, warm."""
        source = self._features.view(torch.uint8).numpy()
        destination = np.empty_like(source)
        times = []
        for _ in range(repeats + 2):
            started = time.perf_counter()
            np.copyto(destination, source)
            times.append(time.perf_counter() - started)
        return times[2:]

    def send(self, repeats: int, lend: bool = True, awake: bool = True) -> list[float]:
        """Seconds from this process's tensor to tensors that the other owns, acknowledged.

        Args:
            lend: as the services do it; else the consumer copies every chunk out of the ring.
            awake: the consumer looks for the next chunk for a moment before it sleeps, so that
                few descriptors have to wake it.
        """
        self._lend, self._awake = lend, awake
        for _ in range(2):
            self._send_all()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            self._send_all()
            times.append(time.perf_counter() - started)
        return times

    def stop(self) -> int:
        """End the consumer; its exit status."""
        self._socket.close()
        self._sender.close()
        status = self._consumer.wait(_TIMEOUT_S)
        self._folder.cleanup()
        return status

    def _send_all(self) -> None:
        outstanding = base = 0
        for chunk in self._chunks:
            if outstanding == _WINDOW:
                self._take_ack()
                outstanding -= 1
            payload = self._sender.put(self._sequence, _SESSION, 0, base, chunk)
            assert payload is not None, "the ring is full"
            head = _CHUNK.pack(self._sequence, base, len(chunk), self._lend, self._awake)
            _send(self._socket, head + payload.SerializeToString())
            self._sequence += 1
            outstanding += 1
            base += len(chunk)
        for _ in range(outstanding):
            self._take_ack()

    def _take_ack(self) -> None:
        """An answered chunk's record is free unless it is lent; others have come back with it."""
        ack = _receive(self._socket)
        sequence, lent = _ACK.unpack_from(ack)
        if not lent:
            self._sender.release(sequence)
        for (released,) in _RELEASED.iter_unpack(ack[_ACK.size :]):
            self._sender.release(released)


def consume(folder: str, instance: bytes, descriptor: int) -> None:
    """The other process: takes each chunk into a tensor of its own and acknowledges it."""
    torch.set_num_threads(1)
    peer = socket.socket(fileno=descriptor)
    options = TransportOptions("memfd", "cpu", Path(folder), _RING_BYTES)
    receiver = asyncio.run(_open_receiver(peer, instance, options))
    taken: dict[int, torch.Tensor] = {}
    awake = False
    with peer:
        while message := (_look_for(peer) if awake else None) or _receive(peer):
            sequence, base, rows, lend, awake = _CHUNK.unpack_from(message)
            payload = pb.TensorPayload.FromString(message[_CHUNK.size :])
            described = (_SESSION, 0, base, rows, payload.shape[1], payload)
            loan = receiver.lend(sequence, *described) if lend else None
            # The tensors of the last pass are still held, as a draft's are until they are used.
            taken[base] = loan.features if loan else receiver.take(*described)
            released = map(_RELEASED.pack, receiver.returned())
            _send(peer, b"".join([_ACK.pack(sequence, loan is not None), *released]))


async def _open_receiver(peer: socket.socket, instance: bytes, options: TransportOptions):  # type: ignore[no-untyped-def]
    receivers = Receivers(instance, options)
    await receivers.start()
    _send(peer, b"listening")
    attach = await asyncio.to_thread(_receive, peer)
    receiver = await receivers.open_receiver(draft_pb2.IngestAttach.FromString(attach))
    _send(peer, b"mapped")
    return receiver


def _send(peer: socket.socket, message: bytes) -> None:
    peer.sendall(message)


def _look_for(peer: socket.socket) -> bytes | None:
    """A message that comes soon, or None."""
    end = time.perf_counter() + _AWAKE_S
    while time.perf_counter() < end:
        with suppress(BlockingIOError):
            return peer.recv(_LARGEST_MESSAGE, socket.MSG_DONTWAIT)
    return None


def _receive(peer: socket.socket) -> bytes:
    """One message, of which the socket keeps the borders; empty at the end of the connection."""
    return peer.recv(_LARGEST_MESSAGE)


if __name__ == "__main__":
    if sys.argv[1:2] == ["consumer"]:
        consume(sys.argv[2], bytes.fromhex(sys.argv[3]), int(sys.argv[4]))
    else:
        producer = Producer()
        serve(
            {
                "start": producer.start,
                "memcpy": producer.memcpy,
                "send": producer.send,
                "stop": producer.stop,
            }
        )
