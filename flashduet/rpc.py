"""gRPC plumbing that is the same everywhere: channels, servers, errors on the wire."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any as Anything
from typing import NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from flashduet import errors
from flashduet.lasting_server import LastingServer

logger = logging.getLogger(__name__)

# Inline tensors are cut into chunks under this, see flashduet.transport.inline.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 10_000
DETAILS_KEY = "grpc-status-details-bin"

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted service is found again within a second, not within gRPC's default two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that a connection attempt is given: a busy peer takes more than a moment.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would each get half of the requests.
    ("grpc.so_reuseport", 0),
]


def open_channel(endpoint: str) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:path`; connecting is left to the first call."""
    return grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)


class _ErrorsToStatus(grpc.aio.ServerInterceptor):
    """Ends every call of our services that raises with a status of ours, never with gRPC's UNKNOWN.

    A FlashduetError keeps its status and its words. Anything else is our own mistake: what it says
    about our insides goes to the log, and the caller is told INTERNAL and no more.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Anything:
        handler: Anything = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/flashduet."):
            return handler
        kind = "_".join(
            "stream" if streams else "unary"
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        # A stream's messages are parsed where the method reads them, a single one before the
        # method runs: here, so that bytes that are no message are answered like any other mistake.
        parse = None if handler.request_streaming else handler.request_deserializer
        guarded = _guarded(
            getattr(handler, kind),
            handler_call_details.method,
            parse,
            headers_first=handler.response_streaming,
        )
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            guarded,
            request_deserializer=None if parse is not None else handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guarded(
    method: Anything,
    name: str,
    parse: Callable[[bytes], Anything] | None,
    *,
    headers_first: bool,
) -> Anything:
    """`method`, of either of grpc.aio's two kinds, with its errors ended as `_fail` does.

    `headers_first`: gRPC would send them with the first message, and once more with the status
    where a deadline cancels that very write. It refuses to, and the caller would wait for ever.
    """

    async def generate(
        request: Anything, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Anything]:
        try:
            given = request if parse is None else parse(request)
            async with aclosing(method(given, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _fail(context, name, error)

    async def call(request: Anything, context: grpc.aio.ServicerContext) -> Anything:
        try:
            if headers_first:
                await context.send_initial_metadata(())
            return await method(request if parse is None else parse(request), context)
        except Exception as error:
            await _fail(context, name, error)

    return generate if inspect.isasyncgenfunction(method) else call


async def _fail(context: grpc.aio.ServicerContext, name: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # It has its status already.
        raise error
    # An error of gRPC's own, but for a wrong use of it: a write failed, or the server has stopped.
    over = isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)
    if context.done() or over:
        # The caller has gone or the server stops, and what was being written came to nothing.
        logger.debug("%s: the call is over: %r", name, error)
        raise asyncio.CancelledError from error
    if isinstance(error, DecodeError):
        error = errors.InvalidRequest("message", "bytes", "must be a message of this method")
    elif not isinstance(error, errors.FlashduetError):
        logger.error("%s failed", name, exc_info=error)
        error = errors.internal_error()
    try:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as lost:
        logger.debug("%s: nobody is there to be told: %r", name, lost)
        raise asyncio.CancelledError from lost


class Server:
    """A grpc.aio server with health and reflection, NOT_SERVING until `serving()` is called.

    Whatever a servicer's method raises reaches the caller as a status of ours.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`interceptors` come after the one that turns errors into a status; they may raise."""
        lasting = LastingServer(
            lambda: grpc.aio.server(
                interceptors=[_ErrorsToStatus(), *interceptors], options=SERVER_OPTIONS
            )
        )
        # Has what generated code calls of a grpc.aio.Server, and is none.
        self.grpc = cast(Anything, lasting)
        self._names = ["", *service_names]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            [*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME], self.grpc
        )
        self.port = 0

    async def start(self, listen: str) -> None:
        """Bind and answer health checks (NOT_SERVING).

        Raises:
            ConfigurationError: the address cannot be bound.
        """
        # The stock servicer says SERVING for "" from the start; say the truth before binding.
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            self.port = self.grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise errors.ConfigurationError(
                f"cannot listen on {listen}: the address is in use or not ours; "
                "choose another with the *_LISTEN variable"
            ) from error
        await self.grpc.start()

    async def serving(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.SERVING)

    async def not_serving(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)

    async def _set(self, status: int) -> None:
        for name in self._names:
            await self._health.set(name, status)


def to_status(error: errors.FlashduetError) -> Status:
    """The error as google.rpc.Status with BadRequest and RetryInfo details."""
    status = Status(code=_code(error).value[0], message=error.message)
    if error.violations:
        detail = BadRequest()
        for violation in error.violations:
            detail.field_violations.add(field=violation.field, description=violation.description)
        _pack(status, detail)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        _pack(status, RetryInfo(retry_delay=delay))
    return status


async def abort(context: grpc.aio.ServicerContext, error: errors.FlashduetError) -> NoReturn:
    """End the call with the error's status and rich details."""
    details = to_status(error).SerializeToString()
    await context.abort(_code(error), error.message, trailing_metadata=((DETAILS_KEY, details),))
    raise AssertionError("abort does not return")


def from_rpc_error(error: grpc.RpcError) -> errors.FlashduetError:
    """The error that the other side raised, rebuilt from status and details."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    message = (error.details() if hasattr(error, "details") else None) or code.name
    violations, retry_after_s = _details(error)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.RemoteInvalidRequest(message, violations)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.Unauthenticated(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.Overloaded(message, retry_after_s or 1.0)
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.Unavailable(message, retry_after_s or 1.0)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(message)
    if code is grpc.StatusCode.CANCELLED:
        return errors.Cancelled(message)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return errors.Conflict(message)
    return errors.FlashduetError(message)


def _code(error: errors.FlashduetError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_status]


def _pack(status: Status, detail: BadRequest | RetryInfo) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)


def _details(error: grpc.RpcError) -> tuple[tuple[errors.FieldViolation, ...], float | None]:
    metadata = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    # A metadatum's stub type hides that it is a (key, value) pair.
    pairs: list[tuple[str, object]] = [tuple(item) for item in metadata or ()]  # type: ignore
    raw = dict(pairs).get(DETAILS_KEY)
    violations: list[errors.FieldViolation] = []
    retry_after_s = None
    if isinstance(raw, bytes):
        for packed in Status.FromString(raw).details:
            bad, retry = BadRequest(), RetryInfo()
            if packed.Unpack(bad):
                violations += [
                    errors.FieldViolation(item.field, item.description)
                    for item in bad.field_violations
                ]
            elif packed.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return tuple(violations), retry_after_s
