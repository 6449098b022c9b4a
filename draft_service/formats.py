"""Which of the public drafter formats a folder is in.

All of them are read into the same network (`draft_service.checkpoint`); ours are written in the
z-lab format.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from pathlib import Path

from draft_service.config_reader import DFLASH2_KEYS
from draft_service.raw_config import CONFIG_FILE, raw_config
from draft_service.speculators import is_speculators
from flashduet.errors import CheckpointError


class CheckpointFormat(Enum):
    """How a drafter is stored; the value is its name in messages."""

    ZLAB = "z-lab DFlash"
    DFLASH2 = "DFlash 2"
    SPECULATORS = "speculators"
    SPECFORGE = "SpecForge"


_DFLASH2_PARTS = ("attention_conv.", "mlp_conv.", "candidate_selector.")
# What z-lab checkpoints do not have, and those of other trainers may.
_SPECFORGE_PARTS = ("qkv_proj", "gate_up_proj", "mask_embedding", "embed_tokens", "lm_head")


def detect_format(folder: Path, tensor_names: Collection[str]) -> CheckpointFormat:
    """Tell the format from config.json and the tensors' names.

    Raises:
        CheckpointError: config.json is missing or broken, or this is no DFlash drafter at all.
    """
    config = raw_config(folder)
    if is_speculators(config):
        return CheckpointFormat.SPECULATORS
    names = [str(name) for name in config.get("architectures") or []]
    nested = config.get("dflash_config")
    keys = set(config) | (set(nested) if isinstance(nested, dict) else set())
    if (
        any("dflash2" in name.lower() for name in names)
        or keys.intersection(DFLASH2_KEYS)
        or any(part in name for name in tensor_names for part in _DFLASH2_PARTS)
    ):
        return CheckpointFormat.DFLASH2
    # SpecForge and others vary the class's name, so the tensors decide once it says DFlash.
    if names and not any("dflash" in name.lower() for name in names):
        raise CheckpointError(
            f"{folder.name}/{CONFIG_FILE}: architectures: expected DFlashDraftModel, found "
            f"{', '.join(names)}; this is not a DFlash drafter"
        )
    foreign = any(part in name for name in tensor_names for part in _SPECFORGE_PARTS)
    if "auto_map" in config or foreign or (names and names != ["DFlashDraftModel"]):
        return CheckpointFormat.SPECFORGE
    return CheckpointFormat.ZLAB
