"""A pytest plugin: fixtures of the tests that talk HTTP to the toy pair."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.tokenization import Tokenizer
from tests.unit.http_support import Http, serve_http
from tests.unit.toy_model import tokenizer_folder


@pytest.fixture(scope="session")
def toy_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_folder(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest_asyncio.fixture
async def http(toy_tokenizer: Tokenizer) -> AsyncIterator[Http]:
    """The toy pair behind HTTP."""
    async with serve_http(toy_tokenizer) as served:
        yield served
