"""What a local stack is made of: choices, addresses, and the environment of each service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashduet.idle_threads import WAITING
from flashduet.models import DEFAULT_NAMES
from flashduet.settings import DtypeChoice, TransportChoice
from flashduet_cli.ports import free_ports

# In the order of starting; stopped the other way round, so that no one loses what it talks to.
SERVICES = ("target", "draft", "gateway")

DEFAULT_LISTEN = {
    "target": "127.0.0.1:50051",
    "draft": "127.0.0.1:50052",
    "gateway": "127.0.0.1:50050",
}
DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Choices for one local stack.

    A field left at None is taken from the environment's FLASHDUET_* variable, and without one is
    the service's own default. `env` is added to every child's environment and wins over both.
    """

    model: str | None = None
    drafter: str | None = None
    # Without a draft service everything is decoded plainly.
    draft: bool = True
    dtype: DtypeChoice | None = None
    device: str | None = None
    transport: TransportChoice | None = None
    # Compute threads of target and draft, which take turns within a request.
    threads: int | None = None
    # Choose free ports, ignoring the variables, so that several stacks run side by side.
    free_ports: bool = False
    socket_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    # Multiplied by how overloaded the machine is, see Stack.
    startup_timeout_s: float = 180.0
    stop_grace_s: float = 15.0
    restart_draft: bool = True
    # First wait before a crashed draft is started again; doubled up to the second figure.
    restart_backoff_s: float = 0.5
    restart_backoff_max_s: float = 30.0
    modules: Mapping[str, str] = field(
        default_factory=lambda: {
            "target": "target_service",
            "draft": "draft_service",
            "gateway": "gateway",
        }
    )

    @property
    def services(self) -> tuple[str, ...]:
        return tuple(name for name in SERVICES if self.draft or name != "draft")

    @property
    def model_reference(self) -> str:
        """What target, draft and gateway are told to load."""
        given = self.model or self.env.get("FLASHDUET_TARGET_MODEL")
        return given or os.environ.get("FLASHDUET_TARGET_MODEL") or "default"

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter is named, or the shipped one is for this target."""
        named = self.drafter or self.env.get("FLASHDUET_DRAFT_MODEL")
        named = named or os.environ.get("FLASHDUET_DRAFT_MODEL")
        return bool(named) or self.model_reference.lower() in DEFAULT_NAMES


@dataclass(frozen=True)
class Addresses:
    """Where the services listen, as `host:port`; `http` is the gateway's OpenAI API."""

    target: str
    draft: str
    gateway: str
    http: str

    def of(self, name: str) -> str:
        return {"target": self.target, "draft": self.draft, "gateway": self.gateway}[name]


def choose_addresses(config: StackConfig) -> Addresses:
    """Free ports if asked for, else the environment's addresses or the defaults."""
    if config.free_ports:
        return Addresses(*(f"127.0.0.1:{port}" for port in free_ports(4)))
    environment = {**os.environ, **config.env}
    chosen = {
        name: environment.get(listen_variable(name), DEFAULT_LISTEN[name]) for name in SERVICES
    }
    http = environment.get("FLASHDUET_GATEWAY_HTTP_LISTEN", DEFAULT_HTTP_LISTEN)
    return Addresses(chosen["target"], chosen["draft"], chosen["gateway"], http)


def listen_variable(name: str) -> str:
    return f"FLASHDUET_{name.upper()}_LISTEN"


def reachable(listen: str) -> str:
    """The address to dial for a listening address: a wildcard host becomes loopback."""
    host, separator, port = listen.rpartition(":")
    if separator and host in ("0.0.0.0", ""):
        return f"127.0.0.1:{port}"
    if separator and host == "[::]":
        return f"[::1]:{port}"
    return listen


def service_environment(
    name: str, config: StackConfig, addresses: Addresses, socket_dir: Path | None
) -> dict[str, str]:
    """The whole environment of one service's process."""
    inherited = dict(os.environ)
    defaults = {
        **WAITING,
        "TOKENIZERS_PARALLELISM": "false",
        # Bars are for terminals; here every redraw would be a line of the log.
        "TQDM_DISABLE": "1",
    }
    chosen: dict[str, str | None] = {listen_variable(name): addresses.of(name)}
    if name == "target":
        chosen |= {
            "FLASHDUET_TARGET_MODEL": config.model_reference,
            "FLASHDUET_TARGET_DRAFTS": reachable(addresses.draft) if config.draft else "",
            "FLASHDUET_TARGET_TRANSPORT": config.transport,
        }
    elif name == "draft":
        chosen |= {
            "FLASHDUET_DRAFT_MODEL": config.drafter,
            "FLASHDUET_DRAFT_TARGET_MODEL": config.model_reference,
            "FLASHDUET_DRAFT_TRANSPORTS": config.transport,
        }
    else:
        chosen |= {
            "FLASHDUET_GATEWAY_HTTP_LISTEN": addresses.http,
            "FLASHDUET_GATEWAY_MODEL": config.model_reference,
            "FLASHDUET_GATEWAY_TARGETS": reachable(addresses.target),
            "FLASHDUET_GATEWAY_DRAFTS": reachable(addresses.draft) if config.draft else "",
        }
    if name in ("target", "draft"):
        prefix = f"FLASHDUET_{name.upper()}"
        chosen |= {
            f"{prefix}_DTYPE": config.dtype,
            f"{prefix}_DEVICE": config.device,
            f"{prefix}_SOCKET_DIR": str(socket_dir) if socket_dir else None,
        }
        if config.threads is not None:
            chosen |= {
                f"{prefix}_THREADS": str(config.threads),
                "OMP_NUM_THREADS": str(config.threads),
            }
    given = {key: value for key, value in chosen.items() if value is not None}
    return {**defaults, **inherited, **given, **config.env, "PYTHONUNBUFFERED": "1"}
