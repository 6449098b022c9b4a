"""A pytest plugin: a draft's end of the rendezvous, alone in a folder of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from flashduet.transport.negotiation import Receivers
from flashduet.transport.options import TransportOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "meet"


@pytest.fixture
def instance() -> bytes:
    return secrets.token_bytes(16)


@pytest_asyncio.fixture
async def draft(folder: Path, instance: bytes) -> AsyncIterator[Receivers]:
    receivers = Receivers(instance, TransportOptions("memfd", "cpu", folder))
    await receivers.start()
    yield receivers
    await receivers.close()
