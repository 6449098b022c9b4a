"""What a service is configured with for its tensor transports. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashduet.errors import ConfigurationError
from flashduet.settings import TransportChoice

MIB = 1024 * 1024
# A ring is mapped whole by the draft; a target that asks for more than this is refused.
MAX_RING_BYTES = 1024 * MIB
MIN_RING_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """One service's side of the negotiation.

    Attributes:
        choice: `auto`, or the one transport that must be used.
        device: torch device whose tensors are sent or wanted, e.g. `cpu` or `cuda:0`.
        socket_dir: folder in which target and draft of one host meet; both are configured with it.
        ring_bytes: room for features on their way, target side only; whole pages are used.

    Raises:
        ConfigurationError: ring_bytes is outside MIN_RING_BYTES..MAX_RING_BYTES.
    """

    choice: TransportChoice
    device: str
    socket_dir: Path
    ring_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        if not MIN_RING_BYTES <= self.ring_bytes <= MAX_RING_BYTES:
            raise ConfigurationError(
                f"a transport ring of {self.ring_bytes} bytes was asked for; "
                f"set ring_mib so that it has {MIN_RING_BYTES} to {MAX_RING_BYTES} bytes"
            )
