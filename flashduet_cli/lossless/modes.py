"""The ways in which every prompt is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashduet.client import SpeculationMode

# What all others are compared with: the target alone, through the same services.
BASE = "off"
TRANSFORMERS = "transformers"
OFFICIAL = "dflash"


@dataclass(frozen=True, slots=True)
class Mode:
    """One way: through the services with these options, or (`speculation` None) by Transformers or
    the official package in this process.

    `as_chat` sends the message for the gateway to render; otherwise the ids are sent.
    """

    name: str
    speculation: SpeculationMode | None
    block_length: int | None = None
    as_chat: bool = False


def service_modes(block_lengths: Sequence[int]) -> list[Mode]:
    """With the configured drafter; the base first, so that a difference shows at once."""
    return [
        Mode(BASE, "off"),
        Mode("draft", "fixed", as_chat=True),
        *(Mode(f"block-{length}", "fixed", length) for length in block_lengths),
    ]


RANDOM_DRAFTER = Mode("random-drafter", "fixed")
BY_TRANSFORMERS = Mode(TRANSFORMERS, None)
BY_OFFICIAL = Mode(OFFICIAL, None)
