"""A checkpoint's config.json before it is understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashduet.errors import CheckpointError

CONFIG_FILE = "config.json"


def raw_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's config.json.

    Raises:
        CheckpointError: it is missing or no object.
    """
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
