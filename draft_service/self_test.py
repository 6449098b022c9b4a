"""What a checkpoint says is to be seen with it, in `flashduet.json` beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from flashduet.errors import CheckpointError
from flashduet.v1 import draft_pb2

SELF_TEST_FILE = "flashduet.json"


class SelfTest(BaseModel, frozen=True):
    """A prompt, the target's greedy answer to it, and the tokens a round to be seen on that."""

    prompt_token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(min_length=1)
    continuation: list[int] = Field(min_length=1)
    expected_tau: float = Field(ge=1)
    block_length: int = Field(ge=2)

    def to_proto(self) -> draft_pb2.SelfTest:
        return draft_pb2.SelfTest(
            prompt_token_ids=self.prompt_token_ids,
            tokens=len(self.continuation),
            block_length=self.block_length,
            acceptance_length=self.expected_tau,
        )


def read_self_test(folder: Path) -> SelfTest | None:
    """The folder's self test; None where it has none, as other makers' folders do.

    Raises:
        CheckpointError: there is one, and it cannot be read; names the field.
    """
    file = folder / SELF_TEST_FILE
    if not file.is_file():
        return None
    try:
        told = json.loads(file.read_text("utf-8"))
        return SelfTest.model_validate(told["self_test"]) if "self_test" in told else None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{file}: self_test.{field}: {first['msg']}") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: not readable: {error}") from error
