"""The other process of test_transport_processes: a target or a draft that runs until it is killed.

Lines on stdin and stdout stand for the Ingest stream.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from flashduet.transport.negotiation import Receivers, open_sender
from flashduet.transport.options import TransportOptions
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2

SESSION = bytes(range(16))
ROWS, WIDTH = 64, 1440
RING_BYTES = 2 << 20


def options(folder: str) -> TransportOptions:
    return TransportOptions("memfd", "cpu", Path(folder), RING_BYTES)


def chunk(sequence: int) -> torch.Tensor:
    """[ROWS, WIDTH] bfloat16, another one for each sequence number."""
    generator = torch.Generator().manual_seed(sequence)
    return torch.randn(ROWS, WIDTH, generator=generator).bfloat16()


async def run_target(folder: str, instance_id: bytes) -> None:
    """Print the attach message and then descriptors; a line on stdin answers a chunk."""
    sender, attach = await open_sender([pb.TRANSPORT_MEMFD], instance_id, options(folder))
    print(attach.SerializeToString().hex(), flush=True)
    sequence = 0
    while True:
        payload = sender.put(sequence, SESSION, 0, sequence * ROWS, chunk(sequence))
        if payload is not None:
            print(payload.SerializeToString().hex(), flush=True)
            sequence += 1
            continue
        answered = await asyncio.to_thread(sys.stdin.readline)
        sender.release(int(answered))


async def run_draft(folder: str, instance_id: bytes) -> None:
    """Listen, take the attach message from stdin, then answer each descriptor with a sum."""
    receivers = Receivers(instance_id, options(folder))
    await receivers.start()
    print("listening", flush=True)
    line = await asyncio.to_thread(sys.stdin.readline)
    receiver = await receivers.open_receiver(draft_pb2.IngestAttach.FromString(bytes.fromhex(line)))
    sequence = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        payload = pb.TensorPayload.FromString(bytes.fromhex(line))
        taken = receiver.take(SESSION, 0, sequence * ROWS, ROWS, WIDTH, payload)
        print(torch.equal(taken, chunk(sequence)), flush=True)
        sequence += 1


if __name__ == "__main__":
    role, where, instance = sys.argv[1:]
    asyncio.run((run_target if role == "target" else run_draft)(where, bytes.fromhex(instance)))
