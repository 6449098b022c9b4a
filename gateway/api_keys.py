"""Who may ask: keys that clients show as `Authorization: Bearer <key>`, over HTTP and gRPC alike.

Without any key configured the ports are open, as they have always been on loopback.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from flashduet.errors import ConfigurationError, Unauthenticated
from gateway.settings import GatewaySettings

_VARIABLE = "FLASHDUET_GATEWAY_API_KEYS"
_SCHEME = "bearer"
# What clients may ask without a key: whether the service lives, and what it speaks.
_OURS = "/flashduet."


class ApiKeys:
    """The keys of one gateway, kept as digests so that comparing tells nothing of their length."""

    def __init__(self, keys: frozenset[str] = frozenset()) -> None:
        self._digests = tuple(_digest(key) for key in sorted(keys))

    @classmethod
    def load(cls, settings: GatewaySettings) -> ApiKeys:
        """The keys of the variable and of the file together.

        Raises:
            ConfigurationError: keys are asked for and there are none, or one cannot be sent.
        """
        given = settings.api_keys.get_secret_value()
        keys = [key.strip() for key in given.split(",") if key.strip()]
        if given and not keys:
            raise ConfigurationError(f"{_VARIABLE}: no key in it; unset it to serve everyone")
        if settings.api_keys_file is not None:
            keys += _keys_of(settings.api_keys_file)
        if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise ConfigurationError(
                f"{_VARIABLE}: a key has characters that no header can carry; "
                "use printable ASCII without spaces"
            )
        return cls(frozenset(keys))

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """Let a caller pass who shows one of the keys.

        Args:
            authorization: the header's value, None without one.

        Raises:
            Unauthenticated: it is none of ours; which part is wrong is not said.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != _SCHEME:
            raise Unauthenticated("an API key is needed: send 'Authorization: Bearer <key>'")
        given = _digest(key.strip())
        # All of them are compared, so that the time says nothing of which one was near.
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(known):
            raise Unauthenticated("the API key is not known")


class RequireApiKey(grpc.aio.ServerInterceptor):
    """Our own methods ask for a key in the call's metadata; health and reflection do not."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        shown = metadata.get("authorization")
        try:
            self._keys.check(shown if isinstance(shown, str) else None)
        except Unauthenticated as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: Unauthenticated) -> Any:
    """A handler of the same kind that raises; `flashduet.rpc.Server` makes it a status."""

    async def refuse(_: Any, __: Any) -> None:
        raise error

    kind = "_".join(
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )
    return getattr(grpc, f"{kind}_rpc_method_handler")(
        refuse,
        # Nothing that a stranger sends is parsed.
        request_deserializer=None,
        response_serializer=handler.response_serializer,
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _keys_of(file: Path) -> list[str]:
    """One key a line; empty lines and lines that begin with # are left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{_VARIABLE}_FILE: {file} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigurationError(f"{_VARIABLE}_FILE: {file} holds no key")
    return keys
