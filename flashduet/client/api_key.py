"""The key that a client shows to a gateway that asks for one."""

from __future__ import annotations

import os

API_KEY_VARIABLE = "FLASHDUET_API_KEY"
# Where a gateway finds its keys: who starts one need not say them twice.
_GATEWAY_VARIABLE = "FLASHDUET_GATEWAY_API_KEYS"

Metadata = tuple[tuple[str, str], ...]


def call_metadata(api_key: str | None = None) -> Metadata:
    """What every call carries; nothing without a key.

    Args:
        api_key: None is the environment's FLASHDUET_API_KEY, else the first of
            FLASHDUET_GATEWAY_API_KEYS.
    """
    if api_key is None:
        own = os.environ.get(_GATEWAY_VARIABLE, "").split(",")
        given = [os.environ.get(API_KEY_VARIABLE, ""), *own]
        api_key = next((key.strip() for key in given if key.strip()), "")
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
