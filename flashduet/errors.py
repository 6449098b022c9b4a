"""Everything that can go wrong, by what the caller can do about it.

Each class names its gRPC status and its HTTP status once; `flashduet.rpc` and the HTTP front end
translate from here and nowhere else. Messages never hold paths of shared memory, addresses or
other secrets of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that was refused: its name and what is wrong with it."""

    field: str
    description: str


class FlashduetError(Exception):
    """Base of all our errors; on its own it means that we are at fault."""

    grpc_status = "INTERNAL"
    http_status = 500
    openai_type = "server_error"
    # OpenAI's word for what is wrong, where its clients know one.
    openai_code: str | None = None

    @property
    def message(self) -> str:
        return str(self)

    # Seconds after which a retry makes sense, for errors that pass by themselves.
    retry_after_s: float | None = None
    violations: tuple[FieldViolation, ...] = ()


def internal_error() -> FlashduetError:
    """What a caller is told about a mistake of ours; what it was belongs into the log."""
    return FlashduetError("internal error; the service's log says more")


class InvalidRequest(FlashduetError):
    """A field of the request is outside its limits."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"
    openai_code = "invalid_value"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        self.field, self.limit = field, limit
        self.violations = (FieldViolation(field, f"{shown} given, {limit}"),)
        super().__init__(f"{field}: {shown} given, {limit}")


class UnknownModel(InvalidRequest):
    """A model is asked for that is not the served one."""

    http_status = 404
    openai_code = "model_not_found"

    def __init__(self, model: str, served: str) -> None:
        super().__init__("model", model, f"served is {served!r}")


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit the context window."""

    openai_code = "context_length_exceeded"


class PayloadTooLarge(InvalidRequest):
    """The request has more bytes than are read."""

    http_status = 413
    openai_code = "request_too_large"


class Unauthenticated(FlashduetError):
    """The caller showed no key, or one that is not ours."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class RemoteInvalidRequest(InvalidRequest):
    """A service refused a field; its words are kept."""

    def __init__(self, message: str, violations: tuple[FieldViolation, ...]) -> None:
        FlashduetError.__init__(self, message)
        self.field = violations[0].field if violations else "request"
        self.limit = violations[0].description if violations else message
        self.violations = violations


class Overloaded(FlashduetError):
    """No room for another session now."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"
    openai_code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExceeded(FlashduetError):
    """The request's time is over; all it held has been freed."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"


class Cancelled(FlashduetError):
    """The caller went away."""

    grpc_status = "CANCELLED"
    http_status = 499
    openai_type = "cancelled_error"


class Unavailable(FlashduetError):
    """A service that the request cannot do without is not reachable or not ready."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    openai_type = "service_unavailable_error"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Conflict(FlashduetError):
    """The message does not fit the session's state (round, base, epoch)."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    openai_type = "conflict_error"


class Incompatible(Conflict):
    """Two services, or a drafter and its target, do not belong together."""


class ConfigurationError(FlashduetError):
    """Something asked for at start cannot be had; the message names the fix."""

    grpc_status = "FAILED_PRECONDITION"


class CheckpointError(ConfigurationError):
    """A checkpoint is truncated, incomplete or of the wrong kind.

    The message names the file, the tensor or key, what was expected and what was found.
    """


class TransportError(FlashduetError):
    """A tensor's bytes cannot be had; `reason` is the name of a NackReason without its prefix."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)
