"""Configuration is loud: a wrong variable is named, a secret is masked."""

import pytest
from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from flashduet.errors import ConfigurationError
from flashduet.settings import ServiceSettings, split_endpoints


class Example(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="FLASHDUET_EXAMPLE_", extra="ignore", frozen=True)

    max_sessions: int = Field(default=4, ge=1)
    api_key: SecretStr = SecretStr("")


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("FLASHDUET_EXAMPLE_MAX_SESSIONS", "9")
    assert Example.load().max_sessions == 9


def test_a_wrong_value_names_the_variable(monkeypatch):
    monkeypatch.setenv("FLASHDUET_EXAMPLE_MAX_SESSIONS", "0")
    with pytest.raises(ConfigurationError, match=r"FLASHDUET_EXAMPLE_MAX_SESSIONS.*'0'"):
        Example.load()


def test_secrets_are_masked(monkeypatch):
    monkeypatch.setenv("FLASHDUET_EXAMPLE_API_KEY", "hunter2")
    text = Example.load().describe()
    assert "hunter2" not in text
    assert "FLASHDUET_EXAMPLE_API_KEY=********" in text


def test_endpoints_are_split():
    assert split_endpoints(" a:1, b:2,") == ["a:1", "b:2"]


def test_a_misspelt_variable_is_found(monkeypatch):
    monkeypatch.setenv("FLASHDUET_EXAMPLE_MAX_SESIONS", "9")
    monkeypatch.setenv("FLASHDUET_EXAMPLE_MAX_SESSIONS", "9")
    monkeypatch.setenv("FLASHDUET_OTHER_THING", "9")
    assert Example.unknown_variables() == ["FLASHDUET_EXAMPLE_MAX_SESIONS"]
