"""Which transport is used, and what a choice that cannot be had says."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from flashduet.errors import ConfigurationError, Incompatible
from flashduet.transport import memfd
from flashduet.transport.negotiation import (
    Receivers,
    offers,
    open_sender,
    opened,
    transport_name,
)
from flashduet.transport.options import MAX_RING_BYTES, MIN_RING_BYTES, TransportOptions
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2
from tests.support.rings import descriptors

MEMFD, INLINE, CUDA_IPC = pb.TRANSPORT_MEMFD, pb.TRANSPORT_INLINE, pb.TRANSPORT_CUDA_IPC
RING = 1 << 20
SESSION = bytes(range(16))


def options(folder: Path, choice: str = "auto") -> TransportOptions:
    return TransportOptions(choice, "cpu", folder, RING)  # type: ignore[arg-type]


async def connect(
    draft: Receivers, instance: bytes, target: TransportOptions
) -> tuple[pb.Transport, torch.Tensor, torch.Tensor]:
    """Handshake as the two servers do it, send one chunk, close; returns transport and tensors."""
    accepted = draft.accept(offers(target.choice, target.device))
    sender, attach = await open_sender(accepted, instance, target)
    receiver = await draft.open_receiver(
        draft_pb2.IngestAttach.FromString(attach.SerializeToString())
    )
    sent = torch.randn(7, 40).bfloat16()
    payload = sender.put(1, SESSION, 0, 3, sent)
    assert payload is not None
    arrived = receiver.take(SESSION, 0, 3, 7, 40, payload)
    assert sender.transport == receiver.transport == attach.transport
    sender.close()
    receiver.close()
    assert draft.rings == 0
    return attach.transport, sent, arrived


@pytest.mark.parametrize(
    ("target_choice", "draft_choice", "expected"),
    [
        ("auto", "auto", MEMFD),
        ("memfd", "auto", MEMFD),
        ("auto", "memfd", MEMFD),
        ("inline", "auto", INLINE),
        ("auto", "inline", INLINE),
    ],
)
async def test_the_best_transport_of_both_sides_carries_the_chunk(
    tmp_path: Path, target_choice: str, draft_choice: str, expected: pb.Transport
) -> None:
    instance = secrets.token_bytes(16)
    draft = Receivers(instance, options(tmp_path / "s", draft_choice))
    await draft.start()
    before = opened[transport_name(expected)]
    transport, sent, arrived = await connect(
        draft, instance, options(tmp_path / "s", target_choice)
    )
    await draft.close()
    assert transport == expected
    assert torch.equal(sent, arrived)
    assert opened[transport_name(expected)] == before + 2  # one end of each side


async def test_auto_falls_through_to_inline_on_another_host_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another socket_dir is what another host looks like from here."""
    instance = secrets.token_bytes(16)
    draft = Receivers(instance, options(tmp_path / "there"))
    await draft.start()
    before = descriptors()
    with caplog.at_level(logging.INFO):
        transport, sent, arrived = await connect(draft, instance, options(tmp_path / "here"))
    assert descriptors() == before
    await draft.close()
    assert transport == INLINE
    assert torch.equal(sent, arrived)
    assert "memfd cannot be used" in caplog.text
    assert "inline chosen" in caplog.text
    assert str(tmp_path) not in caplog.text


async def test_a_forced_transport_that_fails_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="socket_dir"):
        await open_sender([MEMFD, INLINE], bytes(16), options(tmp_path / "here", "memfd"))


async def test_no_ring_memory_falls_through_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    accepted = [MEMFD, INLINE]
    monkeypatch.setattr(memfd, "create_ring", no_memory)
    monkeypatch.setattr(memfd, "available", lambda: True)
    sender, _ = await open_sender(accepted, bytes(16), options(tmp_path))
    assert sender.transport == INLINE


@pytest.mark.parametrize("accepted", [[], [99], [CUDA_IPC]])
async def test_nothing_in_common_is_an_error(tmp_path: Path, accepted: Sequence[int]) -> None:
    with pytest.raises(ConfigurationError, match="accepts none"):
        await open_sender(accepted, bytes(16), options(tmp_path))  # type: ignore[arg-type]


async def test_an_instance_id_of_another_length_never_becomes_a_path(tmp_path: Path) -> None:
    for instance in (b"", b"../../etc/passwd/"):
        sender, _ = await open_sender([MEMFD, INLINE], instance, options(tmp_path))
        assert sender.transport == INLINE


async def test_offers_without_a_common_transport_name_both_sides(tmp_path: Path) -> None:
    draft = Receivers(bytes(16), options(tmp_path, "inline"))
    await draft.start()
    with pytest.raises(Incompatible, match=r"memfd, 99.*inline"):
        draft.accept([MEMFD, 99])  # type: ignore[list-item]
    assert draft.accept([CUDA_IPC, MEMFD, INLINE]) == [INLINE]
    await draft.close()


@pytest.mark.parametrize("transport", [0, MEMFD, CUDA_IPC, 99])
async def test_an_attach_of_a_transport_that_was_not_accepted_is_refused(
    tmp_path: Path, transport: int
) -> None:
    draft = Receivers(bytes(16), options(tmp_path, "inline"))
    await draft.start()
    with pytest.raises(Incompatible, match="not accepted"):
        await draft.open_receiver(draft_pb2.IngestAttach(transport=transport))  # type: ignore[arg-type]
    await draft.close()


def test_without_memfd_auto_means_inline_and_memfd_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memfd.sys, "platform", "darwin")
    assert offers("auto", "cpu") == [INLINE]
    with pytest.raises(ConfigurationError, match="use auto or inline"):
        offers("memfd", "cpu")


def test_offers_are_best_first() -> None:
    assert offers("auto", "cpu") == [MEMFD, INLINE]
    assert offers("memfd", "cpu") == [MEMFD]
    assert offers("inline", "cpu") == [INLINE]


def test_cuda_ipc_on_a_cpu_is_an_error_that_names_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="not a GPU; set the device"):
        offers("cuda_ipc", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error_or_left_out() -> None:
    with pytest.raises(ConfigurationError, match="cuda_ipc cannot be had"):
        offers("cuda_ipc", "cuda:0")
    assert offers("auto", "cuda:0") == [MEMFD, INLINE]


@pytest.mark.parametrize("size", [0, -1, MIN_RING_BYTES - 1, MAX_RING_BYTES + 1])
def test_a_ring_size_outside_the_limits_is_an_error(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigurationError, match="ring_mib"):
        TransportOptions("auto", "cpu", tmp_path, size)
