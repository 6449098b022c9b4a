"""Dockerfile and docker-compose.yml against the code that they configure; needs no engine."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from draft_service.settings import DraftSettings
from flashduet.idle_threads import WAITING
from flashduet.models_cache import CACHE_VARIABLE
from flashduet.telemetry import TRACE_DIR_VARIABLE
from flashduet_cli.stack_config import Addresses, StackConfig, service_environment
from gateway.settings import GatewaySettings
from target_service.settings import TargetSettings

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"target": TargetSettings, "draft": DraftSettings, "gateway": GatewaySettings}
MODULES = {"target": "target_service", "draft": "draft_service", "gateway": "gateway"}
PORTS = {"target": "50051", "draft": "50052", "gateway": "50050"}

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]

each_service = pytest.mark.parametrize("name", sorted(SETTINGS))


def _instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments on one line) of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def _image_environment() -> dict[str, str]:
    pairs = [pair for kind, rest in _instructions() if kind == "ENV" for pair in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def _variables(name: str) -> set[str]:
    prefix = SETTINGS[name].model_config["env_prefix"]
    return {f"{prefix}{field}".upper() for field in SETTINGS[name].model_fields}


def _resolved(value: str | None) -> str | None:
    """What compose makes of a value when no variable is set."""
    return None if value is None else re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value))


def test_the_stack_has_the_three_services_and_no_other() -> None:
    assert set(SERVICES) == set(SETTINGS)


@each_service
def test_each_service_runs_its_own_module(name: str) -> None:
    assert SERVICES[name]["command"] == ["python", "-m", MODULES[name]]
    assert importlib.util.find_spec(f"{MODULES[name]}.__main__")


@each_service
def test_every_setting_can_be_given_and_no_other(name: str) -> None:
    image = _image_environment()
    given = {key for key in SERVICES[name]["environment"] if key.startswith("FLASHDUET_")}
    given |= {key for key in image if key.startswith(f"FLASHDUET_{name.upper()}_")}
    assert given - {TRACE_DIR_VARIABLE} == _variables(name)


@each_service
def test_settings_load_from_what_compose_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _variables(name):
        monkeypatch.delenv(variable, raising=False)
    passed = _image_environment() | SERVICES[name]["environment"]
    for key, value in passed.items():
        if (resolved := _resolved(value)) is not None:
            monkeypatch.setenv(key, resolved)
    settings = SETTINGS[name].load()
    assert settings.listen == f"0.0.0.0:{PORTS[name]}"


@each_service
def test_what_up_sets_is_set_here_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    config = StackConfig(
        drafter="d", dtype="float32", device="cpu", transport="memfd", socket_dir=Path("s")
    )
    wanted = service_environment(
        name, config, Addresses("t:1", "d:2", "g:3", "h:4"), config.socket_dir
    )
    missing = set(wanted) - set(SERVICES[name]["environment"]) - set(_image_environment())
    assert not missing
    for key in (*WAITING, "TOKENIZERS_PARALLELISM", "TQDM_DISABLE"):
        assert _image_environment()[key] == wanted[key]


@each_service
def test_health_is_asked_where_the_service_listens(name: str) -> None:
    kind, python, flag, module, endpoint = SERVICES[name]["healthcheck"]["test"]
    assert (kind, python, flag) == ("CMD", "python", "-m")
    assert importlib.util.find_spec(module)
    listen = _image_environment()[f"FLASHDUET_{name.upper()}_LISTEN"]
    assert endpoint.partition(":")[2] == listen.partition(":")[2] == PORTS[name]


def test_services_dial_each_other_by_name_and_port() -> None:
    target, gateway = SERVICES["target"]["environment"], SERVICES["gateway"]["environment"]
    assert target["FLASHDUET_TARGET_DRAFTS"] == f"draft:{PORTS['draft']}"
    assert gateway["FLASHDUET_GATEWAY_DRAFTS"] == f"draft:{PORTS['draft']}"
    assert gateway["FLASHDUET_GATEWAY_TARGETS"] == f"target:{PORTS['target']}"


def test_all_three_are_told_the_same_model() -> None:
    told = {
        SERVICES["target"]["environment"]["FLASHDUET_TARGET_MODEL"],
        SERVICES["draft"]["environment"]["FLASHDUET_DRAFT_TARGET_MODEL"],
        SERVICES["gateway"]["environment"]["FLASHDUET_GATEWAY_MODEL"],
    }
    assert told == {"${FLASHDUET_TARGET_MODEL:-default}"}


def test_only_the_gateway_is_published_and_on_loopback() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["gateway"]
    published = [_resolved(port) for port in SERVICES["gateway"]["ports"]]
    assert published == ["127.0.0.1:50050:50050", "127.0.0.1:8000:8000"]


def test_target_and_draft_share_the_socket_folder_and_its_owner() -> None:
    image = _image_environment()
    folder = image["FLASHDUET_TARGET_SOCKET_DIR"]
    assert image["FLASHDUET_DRAFT_SOCKET_DIR"] == folder
    for name in ("target", "draft"):
        assert f"sockets:{folder}" in SERVICES[name]["volumes"]
        assert "user" not in SERVICES[name]
        assert SERVICES[name]["image"] == SERVICES["target"]["image"]


@each_service
def test_models_are_kept_in_the_shared_cache(name: str) -> None:
    image = _image_environment()
    assert f"cache:{image[CACHE_VARIABLE]}" in SERVICES[name]["volumes"]
    assert Path(image["HF_HOME"]).is_relative_to(image[CACHE_VARIABLE])


@each_service
def test_a_stop_leaves_time_for_the_services_own_grace(name: str) -> None:
    grace_s = SETTINGS[name].model_fields["shutdown_grace_s"].default
    # The grace, the spans' last flush (5 s) and the engine's current step.
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= 2 * grace_s + 5
    assert SERVICES[name]["init"] is True


def test_the_image_runs_as_a_user_without_rights() -> None:
    kinds = [kind for kind, _ in _instructions()]
    (user,) = [rest for kind, rest in _instructions() if kind == "USER"]
    assert user == "flashduet"
    assert "RUN" not in kinds[kinds.index("USER") :]


def test_every_package_comes_into_the_image() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]["packages"]
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    assert allowed == {
        *packages,
        "models",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "requirements.lock",
    }
    (loop,) = re.findall(r"for package in ([^;]+);", (ROOT / "Dockerfile").read_text())
    assert loop.replace("\\", " ").split() == packages
