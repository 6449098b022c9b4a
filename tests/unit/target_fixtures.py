"""A pytest plugin: a tiny target and a service around it, for the tests of the Decode stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.unit.target_server_support import RunningTarget, running_target
from tests.unit.target_support import TinyTarget, load_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    torch.set_num_threads(1)
    return load_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
async def running(tiny: TinyTarget, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(tiny, tmp_path, max_sessions=3, max_kv_tokens=1000) as target:
        yield target
        await target.nothing_left()
