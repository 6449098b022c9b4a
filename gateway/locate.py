"""Finds the served model's folder without letting torch into this process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from flashduet.errors import ConfigurationError

_TIMEOUT_S = 3600.0

# Run by a child process: reading a GGUF needs torch. The child ends with us.
_RESOLVE = """
import sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from flashduet.errors import FlashduetError
from flashduet.models import resolve_model
try:
    print(resolve_model(sys.argv[1]))
except FlashduetError as error:
    sys.exit(str(error))
"""


async def locate(reference: str) -> Path:
    """The model folder that `reference` names, see `flashduet.models.resolve_model`.

    Raises:
        ConfigurationError: it cannot be had; names the fix.
    """
    if (folder := _local_folder(reference)) is not None:
        return folder
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _RESOLVE,
        reference,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = out.decode().strip().splitlines()
    if process.returncode != 0 or not lines:
        reason = err.decode(errors="replace").strip().splitlines() or ["no message"]
        raise ConfigurationError(f"FLASHDUET_GATEWAY_MODEL: {reason[-1]}")
    return Path(lines[-1])


def _local_folder(reference: str) -> Path | None:
    folder = Path(reference).expanduser()
    return folder if (folder / "config.json").is_file() else None
