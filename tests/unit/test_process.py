"""What loads beside the event loop is told to those who ask, and to nobody else."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from flashduet.process import load_in_background


def fail() -> None:
    raise OSError("the disk is gone")


async def test_what_is_loaded_and_what_fails_is_told() -> None:
    assert await load_in_background(lambda: 3) == 3
    with pytest.raises(OSError, match="disk"):
        await load_in_background(fail)


async def test_a_failure_that_nobody_waits_for_is_no_mistake() -> None:
    """Of a process that was told to stop while it loads."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    loading = load_in_background(fail)
    async with asyncio.timeout(60):
        await asyncio.wait({loading})
    del loading
    gc.collect()
    assert not complaints
