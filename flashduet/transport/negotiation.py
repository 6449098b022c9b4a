"""Which transport a stream uses, and both its ends set up, so that no server branches on it.

Target: `offers` → IngestHello; after IngestWelcome `open_sender` → IngestAttach.
Draft: `Receivers` lives as long as the process; `accept` answers IngestHello, `open_receiver`
answers IngestAttach.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Sequence

import torch

from flashduet.errors import ConfigurationError, Incompatible, TransportError
from flashduet.settings import TransportChoice
from flashduet.transport import cuda_ipc, memfd, rendezvous
from flashduet.transport.base import FeatureReceiver, FeatureSender
from flashduet.transport.inline import InlineReceiver, InlineSender
from flashduet.transport.options import TransportOptions
from flashduet.transport.rendezvous import TOKEN_BYTES, RingListener, RingOffer
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2

log = logging.getLogger(__name__)

NAMES: dict[pb.Transport, str] = {
    pb.TRANSPORT_CUDA_IPC: "cuda_ipc",
    pb.TRANSPORT_MEMFD: "memfd",
    pb.TRANSPORT_INLINE: "inline",
}
# Streams set up by this process since its start, by the transport's name.
opened: Counter[str] = Counter()


def transport_name(transport: pb.Transport) -> str:
    """For logs, counters and spans; numbers of a later release are shown as they are."""
    return NAMES.get(transport, str(int(transport)))


def offers(choice: TransportChoice, device: str) -> list[pb.Transport]:
    """What this process can do, best first.

    Raises:
        ConfigurationError: the one transport asked for cannot be had; the message names the fix.
    """
    on = torch.device(device)
    if choice == "inline":
        return [pb.TRANSPORT_INLINE]
    if choice == "memfd":
        if not memfd.available():
            raise ConfigurationError(
                "transport memfd needs sealed memfds (Linux 5.1 or later): use auto or inline"
            )
        return [pb.TRANSPORT_MEMFD]
    if choice == "cuda_ipc":
        if reason := cuda_ipc.why_unavailable(on):
            raise ConfigurationError(
                f"transport cuda_ipc cannot be had: {reason}; set the device to a GPU that this "
                "process sees, or use auto"
            )
        return [pb.TRANSPORT_CUDA_IPC]
    found: list[pb.Transport] = []
    if on.type == "cuda":
        if reason := cuda_ipc.why_unavailable(on):
            log.info("cuda_ipc is not offered: %s", reason)
        else:
            found.append(pb.TRANSPORT_CUDA_IPC)
    if memfd.available():
        found.append(pb.TRANSPORT_MEMFD)
    return [*found, pb.TRANSPORT_INLINE]


async def open_sender(
    accepted: Sequence[pb.Transport], draft_instance_id: bytes, options: TransportOptions
) -> tuple[FeatureSender, draft_pb2.IngestAttach]:
    """Set up the best transport that both sides can do, and the message that attaches it.

    With `auto`, one that fails (no socket here: another host) gives way to the next.

    Args:
        accepted: IngestWelcome.accepted, best first.

    Raises:
        ConfigurationError: none of them can be set up; the message says why for each.
    """
    possible = offers(options.choice, options.device)
    failures: list[str] = []
    for transport in (each for each in accepted if each in possible):
        name = transport_name(transport)
        try:
            sender, attach = await _open(transport, draft_instance_id, options)
        except (TransportError, OSError, RuntimeError) as error:  # RuntimeError: torch on a GPU
            reason = error.strerror if isinstance(error, OSError) else str(error)
            failures.append(f"{name}: {reason}")
            log.warning("transport %s cannot be used: %s", name, reason)
            continue
        opened[name] += 1
        log.info("transport %s chosen (%d bytes)", name, attach.ring_bytes)
        return sender, attach
    tried = "; ".join(failures) or "the draft accepts none that this side offers"
    raise ConfigurationError(
        f"no tensor transport to the draft ({tried}): give both services the same socket_dir on "
        "one host, or let both use auto"
    )


async def _open(
    transport: pb.Transport, draft_instance_id: bytes, options: TransportOptions
) -> tuple[FeatureSender, draft_pb2.IngestAttach]:
    if transport == pb.TRANSPORT_INLINE:
        attach = draft_pb2.IngestAttach(transport=transport, ring_bytes=options.ring_bytes)
        return InlineSender(options.ring_bytes), attach
    device = torch.device(options.device)
    token = secrets.token_bytes(TOKEN_BYTES)
    sender: memfd.MemfdSender | cuda_ipc.CudaIpcSender
    if transport == pb.TRANSPORT_MEMFD:
        sender = memfd.MemfdSender(options.ring_bytes, device)
        offer = RingOffer(transport, token, sender.ring_bytes)
        descriptors = [sender.descriptor]
    else:
        sender = cuda_ipc.CudaIpcSender(options.ring_bytes, cuda_ipc.rings_of(device))
        offer = RingOffer(transport, token, sender.ring_bytes, sender.device_handle)
        descriptors = []
    try:
        await rendezvous.hand_over(options.socket_dir, draft_instance_id, offer, descriptors)
    except BaseException:
        sender.close()
        raise
    if isinstance(sender, memfd.MemfdSender):
        sender.close_descriptor()  # the draft has its own now
    attach = draft_pb2.IngestAttach(
        transport=transport, ring_bytes=sender.ring_bytes, ring_token=token
    )
    return sender, attach


class Receivers:
    """The draft's side of all its Ingest streams: the socket, and which rings are mapped."""

    def __init__(self, instance_id: bytes, options: TransportOptions) -> None:
        self._options = options
        self._device = torch.device(options.device)
        self._listener = RingListener(options.socket_dir, instance_id, self._open_ring)
        self._open: set[FeatureReceiver] = set()
        self.offers: list[pb.Transport] = []

    @property
    def rings(self) -> int:
        """Rings mapped right now, those included that no stream has claimed yet."""
        self._forget_closed()
        mapped = sum(each.transport != pb.TRANSPORT_INLINE for each in self._open)
        return mapped + self._listener.pending

    async def start(self) -> None:
        """Find out what can be offered and listen for rings.

        Raises:
            ConfigurationError: the one transport asked for cannot be had.
        """
        self.offers = offers(self._options.choice, self._options.device)
        if self.offers == [pb.TRANSPORT_INLINE]:
            return
        try:
            self._listener.start()
        except ConfigurationError as error:
            if self._options.choice != "auto":
                raise
            log.warning("only inline is offered: %s", error)
            self.offers = [pb.TRANSPORT_INLINE]

    async def close(self) -> None:
        """Give back every ring and the socket. Callable twice."""
        await self._listener.close()
        for receiver in self._open:
            receiver.close()
        self._forget_closed()

    def accept(self, offered: Sequence[pb.Transport]) -> list[pb.Transport]:
        """For IngestWelcome: the target's offers that this side can do, in the target's order.

        Raises:
            Incompatible: there is none; the message names both sides'.
        """
        accepted = [each for each in offered if each in self.offers]
        if not accepted:
            theirs = ", ".join(map(transport_name, offered)) or "none"
            ours = ", ".join(map(transport_name, self.offers))
            raise Incompatible(
                f"the target offers the transports {theirs}, this draft {ours}: set one to auto"
            )
        return accepted

    async def open_receiver(self, attach: draft_pb2.IngestAttach) -> FeatureReceiver:
        """The receiving end for a stream, which closes it when it ends.

        Raises:
            Incompatible: a transport that was not accepted, or no such ring was handed over.
        """
        if attach.transport not in self.offers:
            raise Incompatible(
                f"transport {transport_name(attach.transport)} was not accepted by this draft"
            )
        receiver: FeatureReceiver | None
        if attach.transport == pb.TRANSPORT_INLINE:
            receiver = InlineReceiver(self._device)
        else:
            receiver = self._listener.claim(attach.ring_token)
            if receiver is None:
                raise Incompatible("no ring was handed over for this stream, or it expired")
            found = (receiver.transport, receiver.ring_bytes)
            if found != (attach.transport, attach.ring_bytes):
                receiver.close()
                raise Incompatible("the ring handed over is not the one that the stream describes")
        self._forget_closed()
        self._open.add(receiver)
        opened[transport_name(attach.transport)] += 1
        return receiver

    def _forget_closed(self) -> None:
        self._open = {each for each in self._open if not each.closed}

    def _open_ring(self, offer: RingOffer, descriptors: Sequence[int]) -> FeatureReceiver:
        if offer.transport not in self.offers:
            raise TransportError("WRONG_TRANSPORT", "a ring of a transport that is not offered")
        if offer.transport == pb.TRANSPORT_MEMFD and len(descriptors) == 1:
            return memfd.open_receiver(descriptors[0], offer.ring_bytes, self._device)
        if offer.transport == pb.TRANSPORT_CUDA_IPC and not descriptors:
            driver = cuda_ipc.driver_of(self._device)
            return cuda_ipc.open_receiver(
                offer.device_handle, offer.ring_bytes, self._device, driver
            )
        raise TransportError("WRONG_TRANSPORT", "an offer without its one descriptor")
