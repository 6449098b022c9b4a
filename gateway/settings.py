"""The gateway's configuration, from `FLASHDUET_GATEWAY_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from flashduet.settings import ServiceSettings, split_endpoints


class GatewaySettings(ServiceSettings):
    """Every field has an environment variable: the prefix, then the field's name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix="FLASHDUET_GATEWAY_", extra="ignore", frozen=True, protected_namespaces=()
    )

    # gRPC and HTTP addresses; port 0 takes a free one, which is logged.
    listen: str = "127.0.0.1:50050"
    http_listen: str = "127.0.0.1:8000"
    # Comma-separated endpoints. No drafts: every request is served without drafting.
    targets: str = "127.0.0.1:50051"
    drafts: str = "127.0.0.1:50052"
    # Whose tokenizer and chat template are used; must be the targets' own model.
    model: str = "default"
    # Name that clients use. Empty: the targets' own.
    name: str = ""

    # Answers made at the same time (a request with n choices is n of them); more are told to come
    # back.
    max_requests: int = Field(default=256, ge=1, le=100_000)
    # How many of them may be of batch requests. None: seven eighths, also of the targets' sessions,
    # so that interactive ones find room.
    max_batch_requests: int | None = Field(default=None, ge=1, le=100_000)
    # Most choices of one request.
    max_choices: int = Field(default=16, ge=1, le=128)
    # Most tokens of one answer. None: what the context window leaves.
    max_tokens_limit: int | None = Field(default=None, ge=1)
    # Tokens of an answer when the request does not say. None: the limit above.
    default_max_tokens: int | None = Field(default=None, ge=1)
    # Longest life of a request, in seconds; a client's own shorter deadline wins.
    default_deadline_s: float = Field(default=600.0, gt=0)

    # For requests that leave it open, or ask for "auto".
    speculation: Literal["auto", "fixed", "off"] = "auto"
    # Anchor + draft tokens of a block. None: what the drafter was trained with.
    block_length: int | None = Field(default=None, ge=2)

    # A proposal is waited for no longer than `multiple` times the recent 99th percentile, within
    # these bounds; see gateway.budget.
    draft_budget_multiple: float = Field(default=4.0, ge=1)
    draft_budget_floor_ms: float = Field(default=50.0, gt=0)
    draft_budget_ceiling_ms: float = Field(default=1000.0, gt=0)
    # How often targets and drafts are asked whether and what they serve.
    poll_s: float = Field(default=0.5, gt=0, le=60)

    # Keys that clients must show, comma-separated, and a file with one a line; with neither the
    # ports are open. Over gRPC they are shown in the metadata's `authorization`.
    api_keys: SecretStr = SecretStr("")
    api_keys_file: Path | None = None
    # Largest body of an HTTP request, in bytes; more is answered 413.
    http_max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    # A stream that has been quiet for so long gets a comment line, which keeps proxies from closing
    # it; an answer that is not there after this time has begun with status 200.
    http_keepalive_s: float = Field(default=10.0, gt=0, le=600)
    # Prompts of one completion request, and how many of them are answered at the same time.
    http_max_prompts: int = Field(default=128, ge=1, le=100_000)
    http_prompts_at_once: int = Field(default=8, ge=1, le=1024)
    # Web pages of these origins may ask, comma-separated ("*": all). Empty: no page but our own.
    http_cors_origins: str = ""

    @property
    def most_choices(self) -> int:
        """Choices of one request, which must also find room at once."""
        return min(self.max_choices, self.max_requests)

    def most_batch_requests(self, sessions: int) -> int:
        """Answers of batch requests at a time, where the targets have so many sessions."""
        if self.max_batch_requests is not None:
            return self.max_batch_requests
        return max(min(self.max_requests, sessions) * 7 // 8, 1)

    @field_validator("targets")
    @classmethod
    def _some_target(cls, value: str) -> str:
        if not split_endpoints(value):
            raise ValueError("at least one host:port is needed")
        return value
