"""Configuration once: one model per process, filled from the environment, printed at start."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from flashduet.errors import ConfigurationError

TransportChoice = Literal["auto", "memfd", "inline", "cuda_ipc"]
DtypeChoice = Literal["auto", "float32", "float16", "bfloat16"]

LONGEST_LOOKUP = 16
"""Tokens that can be asked to repeat; of a longer repetition the rest is not looked at."""


def default_socket_dir() -> Path:
    """Where target and draft meet to pass ring descriptors, private to the user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/flashduet-{os.getuid()}"
    return Path(base) / "flashduet"


class ServiceSettings(BaseSettings):
    """What every service has. Subclasses set `env_prefix` in their model_config."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True)

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Time given to requests under way when the service is asked to stop.
    shutdown_grace_s: float = Field(default=5.0, ge=0, le=600)

    @classmethod
    def load(cls, **overrides: object) -> Self:
        """Read the environment.

        Raises:
            ConfigurationError: names each variable that is wrong and why.
        """
        prefix = cls.model_config.get("env_prefix", "")
        try:
            return cls(**overrides)  # type: ignore[arg-type]
        except ValidationError as error:
            lines = [
                f"{prefix}{'_'.join(str(part) for part in item['loc'])}".upper()
                + f": {item['msg']} (given: {item.get('input')!r})"
                for item in error.errors()
            ]
            raise ConfigurationError("; ".join(lines)) from error

    @classmethod
    def unknown_variables(cls) -> list[str]:
        """Variables that begin like ours and name no field: most likely misspelt."""
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        known = {(prefix + name).upper() for name in cls.model_fields}
        return sorted(
            name
            for name in map(str.upper, os.environ)
            if name.startswith(prefix) and name not in known
        )

    def describe(self) -> str:
        """One line a field, as environment variables; secrets masked."""
        prefix = str(self.model_config.get("env_prefix", ""))
        lines = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            shown = "********" if isinstance(value, SecretStr) else value
            lines.append(f"{(prefix + name).upper()}={shown}")
        return "\n".join(lines)


class LookupSettings(ServiceSettings):
    """When drafts are copied from the text: what of the draft service's configuration commands read
    without the rest."""

    model_config = SettingsConfigDict(env_prefix="FLASHDUET_DRAFT_", extra="ignore", frozen=True)

    # Where so many of the last tokens came before, what followed them is proposed again, without a
    # pass of the drafter, or after the drafts that led there; 0: never.
    lookup: int = Field(default=3, ge=0, le=LONGEST_LOOKUP)


def setup_logging(level: str) -> None:
    """Plain lines on stderr; the local stack prefixes them with the service's name."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for noisy in ("httpx", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def split_endpoints(value: str) -> list[str]:
    """`"a:1, b:2"` → `["a:1", "b:2"]`."""
    return [part.strip() for part in value.split(",") if part.strip()]
