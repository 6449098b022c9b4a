"""A gateway to talk to: the one that is running, or one started for this call alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from flashduet.client.api_key import call_metadata
from flashduet.errors import ConfigurationError, Unavailable
from flashduet.healthcheck import Health, probe
from flashduet.models import served_name
from flashduet.rpc import open_channel
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc
from flashduet_cli.console import err, fail, log_line, note
from flashduet_cli.options import DEFAULT_ENDPOINT
from flashduet_cli.pull import pull_in_thread
from flashduet_cli.stack import Stack, StackConfig

# A stack that is loading its models is waited for rather than doubled.
LOADING_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which gateway a command wants.

    Attributes:
        endpoint: the one named; None takes the usual one if it is there, else starts a stack.
        start: start a stack in any case.
        config: of a stack that is started.
        own: options given that only such a stack can follow.
    """

    endpoint: str | None
    start: bool
    config: StackConfig
    own: tuple[str, ...]
    verbose: bool


@asynccontextmanager
async def reached(where: Where) -> AsyncIterator[tuple[str, str | None]]:
    """The address of a gateway that serves for the block's time, and the model to ask for by name.

    Raises:
        FlashduetError: nobody answers at the address that was named, or no stack came up.
    """
    endpoint = where.endpoint or DEFAULT_ENDPOINT
    if not where.start and await serving(endpoint):
        if where.own:
            fail(
                f"{' and '.join(where.own)} can only be chosen for a stack that this command "
                f"starts, and one is running at {endpoint}; add --start, or give the option "
                "to `flashduet up`",
                2,
            )
        model = where.config.model
        yield endpoint, None if model is None else served_name(model)
        return
    if not where.start:
        if where.endpoint is not None:
            raise Unavailable(
                f"--endpoint {endpoint}: no gateway answers there; start one with `flashduet up`, "
                "or leave --endpoint out (or add --start) for a stack of this call's own"
            )
        note(f"no stack at {endpoint}; starting one for this call")
    config = undrafted_if_unknown(where.config)
    async with started(config, verbose=where.verbose) as stack:
        yield stack.endpoint, None


async def serving(endpoint: str) -> bool:
    """Whether a gateway serves at `endpoint`; one that is still loading is waited for.

    Raises:
        ConfigurationError: the endpoint is no address, or another service's.
        Unavailable: a gateway is there and did not become ready in time.
    """
    if "://" in endpoint or ":" not in endpoint:
        raise ConfigurationError(
            f"--endpoint {endpoint}: the gateway's gRPC address is wanted, as host:port "
            "without a scheme or path"
        )
    deadline, said = time.monotonic() + LOADING_TIMEOUT_S, False
    while True:
        health = await probe(endpoint)
        if health is Health.SERVING:
            await _check_gateway(endpoint)
        if health is not Health.NOT_SERVING:
            return health is Health.SERVING
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the gateway at {endpoint} is not serving after {LOADING_TIMEOUT_S:g} s; "
                "its log says what it waits for"
            )
        if not said:
            note(f"the gateway at {endpoint} is not serving yet; waiting for it")
            said = True
        await asyncio.sleep(0.5)


async def _check_gateway(endpoint: str) -> None:
    """Raise ConfigurationError where a service answers that is no gateway."""
    async with open_channel(endpoint) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            await stub.GetLoad(
                gateway_pb2.GatewayServiceGetLoadRequest(), timeout=5.0, metadata=call_metadata()
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigurationError(
                    f"--endpoint {endpoint}: a gRPC service that is no Flashduet gateway answers "
                    "there; `flashduet up` tells the gateway's address when it is ready"
                ) from error


def undrafted_if_unknown(config: StackConfig) -> StackConfig:
    """The same, without a draft service where no drafter is named or known for the target."""
    if not config.draft or config.has_drafter:
        return config
    note(f"no drafter is known for {config.model_reference}: decoding plainly (see --drafter)")
    return replace(config, draft=False)


@asynccontextmanager
async def started(
    config: StackConfig, *, verbose: bool, spinner: bool = True
) -> AsyncIterator[Stack]:
    """A stack of our own, up for the block's time; progress goes to stderr.

    `spinner`: draw one on a terminal while it starts (not where a bar is drawn already).

    Raises:
        FlashduetError: a model cannot be had, or a service did not come up.
    """
    await pull_in_thread(config.model_reference)
    stack = Stack(config, log=log_line if verbose else _quiet, event=_event)
    names = ", ".join(config.services)
    if verbose or not spinner or not err.is_terminal:
        note(f"starting {names}")
        await stack.start()
    else:
        with err.status(f"starting {names}"):
            await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


def _quiet(service: str, line: str) -> None:
    """The log of a stack that nobody asked about; its end still shows the last lines."""


def _event(service: str, what: str) -> None:
    note(f"{service}: {what}")
