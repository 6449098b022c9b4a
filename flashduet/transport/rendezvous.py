"""Where target and draft of one host meet once per stream to hand a ring over.

A Unix socket in a folder that both were configured with; that it worked is the proof that they
share a host. Its file name is made here from the draft's 16-byte instance id, so nothing is opened
by a name from the wire. One packet goes each way: the offer, with the ring's descriptor as
SCM_RIGHTS, and one byte back. Both sides look at the other's user id.

The listener owns what was handed over until the stream that names its token claims it; unclaimed
rings are bounded in number and given back after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashduet.errors import ConfigurationError, TransportError
from flashduet.transport.base import FeatureReceiver

log = logging.getLogger(__name__)

INSTANCE_ID_BYTES = 16
TOKEN_BYTES = 16
HANDLE_BYTES = 64
EXCHANGE_TIMEOUT_S = 5.0
PENDING_TIMEOUT_S = 15.0
MAX_PENDING = 16
MAX_CONNECTIONS = 16
# A listener's socket gets its final name once it listens; what still has the other one after this
# long was left by a process that died in between.
_HALF_BORN_S = 60.0

_OFFER = struct.Struct(f"<8sI{TOKEN_BYTES}sQ{HANDLE_BYTES}s")
_MAGIC = b"fdring01"
_TAKEN, _REFUSED, _BUSY = b"\x01", b"\x02", b"\x03"
_SUN_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class RingOffer:
    """What is handed over: the transport, the stream's token, the ring's size.

    `device_handle` is a CUDA IPC handle (64 bytes), zeros for a ring that comes as a descriptor.
    """

    transport: int
    token: bytes
    ring_bytes: int
    device_handle: bytes = bytes(HANDLE_BYTES)

    def encode(self) -> bytes:
        return _OFFER.pack(_MAGIC, self.transport, self.token, self.ring_bytes, self.device_handle)

    @classmethod
    def decode(cls, packet: bytes) -> RingOffer:
        """Raises TransportError when the packet is not an offer of this version."""
        if len(packet) != _OFFER.size or not packet.startswith(_MAGIC):
            raise TransportError("WRONG_TRANSPORT", "the packet is not a ring offer")
        _, transport, token, ring_bytes, handle = _OFFER.unpack(packet)
        return cls(transport, token, ring_bytes, handle)


# Makes a receiver of an offer and the descriptors that came with it. Does not close them.
OpenRing = Callable[[RingOffer, Sequence[int]], FeatureReceiver]


def socket_path(folder: Path, instance_id: bytes) -> Path:
    """The draft's socket. Raises TransportError unless the id has 16 bytes."""
    if len(instance_id) != INSTANCE_ID_BYTES:
        raise TransportError("WRONG_TRANSPORT", "an instance id of the wrong length")
    return folder / f"{instance_id.hex()}.sock"


async def hand_over(
    folder: Path, instance_id: bytes, offer: RingOffer, descriptors: Sequence[int]
) -> None:
    """Give a ring to the draft with that instance id; the caller keeps its descriptors.

    Raises:
        TransportError: nobody listens there, another user does, or the ring was refused.
    """
    path = socket_path(folder, instance_id)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as peer:
        peer.setblocking(False)
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                await loop.sock_connect(peer, str(path))
                _require_same_user(peer)
                if descriptors:
                    socket.send_fds(peer, [offer.encode()], list(descriptors))
                else:
                    peer.send(offer.encode())
                answer = await loop.sock_recv(peer, 1)
        except TimeoutError as error:
            raise TransportError(
                "WRONG_TRANSPORT", f"the draft did not answer within {EXCHANGE_TIMEOUT_S:g} s"
            ) from error
        except OSError as error:
            # No path in the message: it may travel further than this host.
            raise TransportError(
                "WRONG_TRANSPORT",
                f"the draft is not reachable by socket_dir ({os.strerror(error.errno or 0)})",
            ) from error
    if answer != _TAKEN:
        why = "has too many unclaimed rings" if answer == _BUSY else "refused the ring"
        raise TransportError("WRONG_TRANSPORT", f"the draft {why}")


class RingListener:
    """The draft's socket and the rings that wait for their streams. All on one event loop."""

    def __init__(self, folder: Path, instance_id: bytes, open_ring: OpenRing) -> None:
        self._path = socket_path(folder, instance_id)
        self._open_ring = open_ring
        self._pending: dict[bytes, FeatureReceiver] = {}
        self._expiry: dict[bytes, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None

    @property
    def pending(self) -> int:
        """Rings handed over and not claimed."""
        return len(self._pending)

    def start(self) -> None:
        """Bind and listen.

        Raises:
            ConfigurationError: the folder is not private to this user, or the path is too long.
        """
        folder = self._path.parent
        _require_private(folder)
        _sweep(folder)
        unborn = self._path.with_suffix(".new")
        # The final name is the longer one.
        if len(os.fsencode(self._path)) > _SUN_PATH_BYTES:
            raise ConfigurationError(
                f"{folder} is too long for a Unix socket: choose a shorter *_SOCKET_DIR"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.setblocking(False)
            listener.bind(str(unborn))
            os.chmod(unborn, 0o600)
            listener.listen(MAX_CONNECTIONS)
            # Only listening sockets have the final name, so that a sweep can tell dead ones.
            os.rename(unborn, self._path)
        except OSError as error:
            listener.close()
            raise ConfigurationError(
                f"cannot listen in {folder} ({error.strerror}): choose another *_SOCKET_DIR"
            ) from error
        self._socket = listener
        self._spawn(self._accept(listener))

    async def close(self) -> None:
        """Give back every unclaimed ring, and the socket with its file. Callable twice."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                self._path.unlink()
        for token in list(self._pending):
            self._expire(token)

    def claim(self, token: bytes) -> FeatureReceiver | None:
        """The receiver of the ring handed over with `token`; the caller owns it from now on."""
        if timer := self._expiry.pop(token, None):
            timer.cancel()
        return self._pending.pop(token, None)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:  # e.g. out of descriptors: others may come back
                log.warning("cannot accept on the ring socket: %s", error.strerror)
                await asyncio.sleep(0.2)
                continue
            if len(self._tasks) > MAX_CONNECTIONS:
                peer.close()
                continue
            self._spawn(self._serve(peer))

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                    await _readable(peer)
                if answer := self._take(peer):
                    peer.send(answer)
            except (TransportError, TimeoutError, OSError, RuntimeError) as error:
                log.warning("a ring was refused: %s", error)
                with contextlib.suppress(OSError):
                    peer.send(_REFUSED)

    def _take(self, peer: socket.socket) -> bytes:
        _require_same_user(peer)
        packet, descriptors, flags, _ = socket.recv_fds(
            peer, _OFFER.size + 1, 1, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if not packet:  # another draft looked whether this socket is alive
                return b""
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise TransportError("WRONG_TRANSPORT", "the offer was cut short")
            offer = RingOffer.decode(packet)
            if offer.token in self._pending:
                raise TransportError("WRONG_TRANSPORT", "the offer's token is in use")
            if len(self._pending) >= MAX_PENDING:
                return _BUSY
            receiver = self._open_ring(offer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        loop = asyncio.get_running_loop()
        self._pending[offer.token] = receiver
        self._expiry[offer.token] = loop.call_later(PENDING_TIMEOUT_S, self._expire, offer.token)
        return _TAKEN

    def _expire(self, token: bytes) -> None:
        if receiver := self.claim(token):
            receiver.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _readable(peer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer)


def _require_same_user(peer: socket.socket) -> None:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, user, _ = struct.unpack("iII", credentials)
    if user != os.geteuid():
        raise TransportError("WRONG_TRANSPORT", "the peer on the ring socket is another user")


def _require_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be made ({error.strerror}): choose another *_SOCKET_DIR"
        ) from error
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{folder} is not a folder private to this user: `chmod 700` it, or choose another "
            "*_SOCKET_DIR"
        )


def _sweep(folder: Path) -> None:
    """Remove the sockets that killed drafts left behind: nobody listens on them."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISSOCK(status.st_mode):
                continue
            if path.suffix == ".new":
                dead = time.time() - status.st_mtime > _HALF_BORN_S
            else:
                dead = path.suffix == ".sock" and _refuses(path)
            if dead:
                path.unlink()


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
