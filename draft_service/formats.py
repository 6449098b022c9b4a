"""Which of the public drafter formats a folder is in.

The z-lab format (and SpecForge, which writes the same under other names) is read. The others are
told apart so that they are refused by name; reading one means adding its branch in
`draft_service.checkpoint.load_drafter`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

from draft_service.config import CONFIG_FILE
from flashduet.errors import CheckpointError


class CheckpointFormat(Enum):
    """How a drafter is stored; the value is its name in messages."""

    ZLAB = "z-lab DFlash"
    DFLASH2 = "DFlash 2"
    SPECULATORS = "speculators"


_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DFLASH2_PARTS = ("attention_conv.", "mlp_conv.", "candidate_selector.")
_SPECULATORS_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")


def detect_format(folder: Path, tensor_names: Collection[str]) -> CheckpointFormat:
    """Tell the format from config.json and the tensors' names.

    Raises:
        CheckpointError: config.json is missing or broken, or this is no DFlash drafter at all.
    """
    config = _raw_config(folder)
    if any(key in config for key in _SPECULATORS_KEYS):
        return CheckpointFormat.SPECULATORS
    names = [str(name) for name in config.get("architectures") or []]
    nested = config.get("dflash_config")
    keys = set(config) | (set(nested) if isinstance(nested, dict) else set())
    if (
        any("dflash2" in name.lower() for name in names)
        or keys.intersection(_DFLASH2_KEYS)
        or any(part in name for name in tensor_names for part in _DFLASH2_PARTS)
    ):
        return CheckpointFormat.DFLASH2
    # SpecForge and others vary the class's name, so the tensors decide once it says DFlash.
    if names and not any("dflash" in name.lower() for name in names):
        raise CheckpointError(
            f"{folder.name}/{CONFIG_FILE}: architectures: expected DFlashDraftModel, found "
            f"{', '.join(names)}; this is not a DFlash drafter"
        )
    return CheckpointFormat.ZLAB


def _raw_config(folder: Path) -> dict[str, Any]:
    source = f"{folder.name}/{CONFIG_FILE}"
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}: expected a drafter's config, found none") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source}: expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{source}: expected an object, found {type(config).__name__}")
    return config
