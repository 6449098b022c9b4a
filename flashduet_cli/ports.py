"""TCP ports: finding free ones, and saying who holds one that is not."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from flashduet.errors import ConfigurationError


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that were free a moment ago; all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def check_free(listen: str, name: str, variable: str) -> None:
    """Try whether `host:port` can be bound; Unix-socket addresses are left to the service.

    Raises:
        ConfigurationError: it cannot; the message names the holder where it is ours to see, and
            the variable that chooses another address.
    """
    host, separator, port = listen.rpartition(":")
    if listen.startswith("unix:") or not separator or not port.isdigit():
        return
    family = socket.AF_INET6 if ":" in host.strip("[]") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                what = f"is in use{_holder(int(port))}"
            else:
                what = f"cannot be bound ({error.strerror})"
            raise ConfigurationError(
                f"{name}: {listen} {what}; stop what holds it, choose another address with "
                f"{variable}, or any with `flashduet up --free-ports`"
            ) from error


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                if connection.pid is None:
                    return ""
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        pass
    return ""
