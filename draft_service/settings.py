"""The draft service's configuration; each field is an environment variable FLASHDUET_DRAFT_*."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from draft_service.context import ContextDtype
from flashduet.settings import (
    DtypeChoice,
    LookupSettings,
    TransportChoice,
    default_socket_dir,
)


class DraftSettings(LookupSettings):
    """Sizes are upper bounds."""

    model_config = SettingsConfigDict(
        env_prefix="FLASHDUET_DRAFT_", extra="ignore", frozen=True, protected_namespaces=()
    )

    listen: str = "127.0.0.1:50052"
    # The drafter: a folder or a Hub id; `default` is the one shipped for the default target.
    model: str = "default"
    # The target whose embedding and head are read; any reference that the target service takes.
    target_model: str = "default"
    # The target's name; empty: made from the reference.
    target_name: str = ""
    dtype: DtypeChoice = "auto"
    # `auto`, `cpu`, `cuda` or `cuda:N`.
    device: str = "auto"
    # Transports that targets may choose from.
    transports: TransportChoice = "auto"
    # Where a target on this host hands its ring over; the same as the target's.
    socket_dir: Path = Field(default_factory=default_socket_dir)
    max_sessions: int = Field(default=256, ge=1, le=4096)
    # Rows (positions) of context over all sessions, those kept for later prefixes included; memory
    # for them is set aside at start.
    max_context_rows: int = Field(default=65_536, ge=16)
    # Rows in a block, the grain in which context is handed out and prefixes are found again.
    context_block_rows: int = Field(default=16, ge=1, le=4096)
    # How context rows are kept: `auto` as they are computed, `int8` in a little over half of that.
    context_dtype: ContextDtype = "auto"
    # `auto`: draft only from the tokens of the shortlist beside the checkpoint, if there is one.
    vocabulary: Literal["auto", "full"] = "auto"
    # Anchor + draft tokens of one proposal.
    max_block_length: int = Field(default=32, ge=2, le=256)
    # How long a session lives without a message from its gateway.
    lease_s: float = Field(default=30.0, gt=0, le=3600)
    # Threads of the engine; 0: all cores.
    threads: int = Field(default=0, ge=0, le=1024)
