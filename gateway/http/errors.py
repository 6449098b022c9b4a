"""Errors as OpenAI's clients read them."""

from __future__ import annotations

import logging
import math

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from flashduet.errors import (
    DeadlineExceeded,
    FlashduetError,
    InvalidRequest,
    Unauthenticated,
    internal_error,
)
from gateway.http.shapes import ErrorAnswer, ErrorBody, json_response

logger = logging.getLogger(__name__)

# Where the core's name of a field is not the one that a client of this API knows.
_NAMES = (
    ("sampling.", ""),
    ("template_kwargs", "chat_template_kwargs"),
    ("text", "prompt"),
    ("token_ids", "prompt"),
    ("chat", "messages"),
)


class SlowBody(DeadlineExceeded):
    """A request's body did not arrive in time."""

    http_status = 408


def handle_errors(app: FastAPI) -> None:
    """Answer everything that can go wrong with an error object and the right status."""

    @app.exception_handler(FlashduetError)
    async def refused(_: Request, failure: FlashduetError) -> Response:
        return error_response(failure)

    @app.exception_handler(HTTPException)
    async def no_such_route(_: Request, failure: HTTPException) -> Response:
        body = ErrorBody(
            message=failure.detail, type="invalid_request_error", param=None, code=None
        )
        return _response(body, failure.status_code, dict(failure.headers or {}))

    @app.exception_handler(Exception)
    async def broken(_: Request, failure: Exception) -> Response:
        return error_response(ours(failure))


def ours(failure: BaseException) -> FlashduetError:
    """What a client may know of a failure; a mistake of ours goes to the log."""
    if isinstance(failure, FlashduetError):
        return failure
    logger.error("a request failed", exc_info=failure)
    return internal_error()


def error_response(failure: FlashduetError) -> Response:
    headers = {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(failure.retry_after_s)))
    if isinstance(failure, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return _response(error_body(failure), failure.http_status, headers)


def error_body(failure: FlashduetError) -> ErrorBody:
    """The failure in OpenAI's words; `param` is the field as the client wrote it."""
    message, param = failure.message, None
    if isinstance(failure, InvalidRequest):
        param = _client_name(failure.field)
        if message.startswith(failure.field):
            message = param + message[len(failure.field) :]
    return ErrorBody(
        message=message, type=failure.openai_type, param=param, code=failure.openai_code
    )


def error_text(failure: FlashduetError) -> str:
    """The error object alone, as a stream that breaks off ends."""
    return ErrorAnswer(error=error_body(failure)).json_text()


def _client_name(field: str) -> str:
    for name, theirs in _NAMES:
        if (
            field == name
            or field.startswith((f"{name}.", f"{name}["))
            or (name.endswith(".") and field.startswith(name))
        ):
            return theirs + field[len(name) :]
    return field


def _response(body: ErrorBody, status: int, headers: dict[str, str]) -> Response:
    return json_response(ErrorAnswer(error=body), status, headers)
