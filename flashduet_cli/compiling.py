"""Compiling a target ahead of its first start."""

from __future__ import annotations

import re
from pathlib import Path

from flashduet.errors import ConfigurationError
from flashduet_cli.console import note
from flashduet_cli.process import ServiceProcess
from flashduet_cli.stack_config import StackConfig, choose_addresses, service_environment

_STOP_GRACE_S = 5.0
_LOGGED = re.compile(r"^\S+ \S+ [A-Z]+ \S+: (?P<message>.*)")


async def compile_target(config: StackConfig) -> Path:
    """The compiled pass of the target that a stack of this config would serve, made if need be.

    Raises:
        ConfigurationError: it cannot be compiled; says why.
    """
    environment = service_environment("target", config, choose_addresses(config), None)
    process = ServiceProcess("target", "target_service.compiled", environment, _tell)
    await process.start()
    try:
        status = await process.wait()
    finally:
        await process.stop(_STOP_GRACE_S)
    said = next((line for line in reversed(process.tail) if line.strip()), "")
    if status:
        reason = said.removeprefix("target: ") or f"the compiler ended with status {status}"
        raise ConfigurationError(reason)
    return Path(said)


def _tell(service: str, line: str) -> None:
    if (logged := _LOGGED.match(line)) and "compil" in line:
        note(logged["message"])
