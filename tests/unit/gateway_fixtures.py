"""A pytest plugin: fixtures of the tests that talk to the toy pair, by gRPC or HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.tokenization import Tokenizer
from tests.unit.http_support import Http, serve_http
from tests.unit.toy_model import tokenizer_folder
from tests.unit.toy_stack import ToyStack, toy_stack


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_folder(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest_asyncio.fixture
async def stack(tokenizer: Tokenizer) -> AsyncIterator[ToyStack]:
    """The toy pair behind the gateway."""
    async with toy_stack(tokenizer) as running:
        yield running


@pytest_asyncio.fixture
async def http(tokenizer: Tokenizer) -> AsyncIterator[Http]:
    """The toy pair behind HTTP."""
    async with serve_http(tokenizer) as served:
        yield served
