"""The decode loop over real gRPC: the target's tokens come out whatever the draft does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from flashduet.v1 import gateway_pb2
from gateway.tokenization import Tokenizer
from tests.unit.gateway_support import (
    ToyStack,
    ask,
    ids_of,
    plain_answer,
    tokenizer_folder,
    toy_stack,
)

PROMPT = ids_of("hello")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_folder(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest_asyncio.fixture
async def stack(tokenizer: Tokenizer) -> AsyncIterator[ToyStack]:
    async with toy_stack(tokenizer) as running:
        yield running


async def test_drafting_changes_no_token(stack: ToyStack) -> None:
    expected = plain_answer(PROMPT, 40)
    for mode, block_length in [
        ("off", None),
        ("fixed", 2),
        ("fixed", 8),
        ("fixed", 16),
        ("auto", 5),
    ]:
        answer = await stack.generate(ask(PROMPT, mode=mode, block_length=block_length))
        assert answer.token_ids == expected
        assert answer.complete.finish_reason == gateway_pb2.FINISH_REASON_LENGTH
    await stack.all_free()
