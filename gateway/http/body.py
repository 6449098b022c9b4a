"""A request's body: read within bounds, and understood or refused by the name of a field."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from flashduet.errors import Cancelled, InvalidRequest, PayloadTooLarge
from gateway.http.errors import SlowBody
from gateway.http.fields import REFUSED

# A client that sends slower than this holds a connection for nothing.
_ARRIVAL_S = 60.0

Asked = TypeVar("Asked", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLarge: nothing past the limit has been read.
        SlowBody, Cancelled: it never came.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise PayloadTooLarge("body", f"{announced} bytes", f"at most {max_bytes}")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_ARRIVAL_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise PayloadTooLarge("body", f"over {size} bytes", f"at most {max_bytes}")
                parts.append(part)
    except ClientDisconnect:
        raise Cancelled("the client went away in the middle of its request") from None
    except TimeoutError:
        raise SlowBody(f"the body did not arrive within {_ARRIVAL_S:g} seconds") from None
    return b"".join(parts)


def parse(asked: type[Asked], body: bytes) -> Asked:
    """The body as a request of a kind.

    Raises:
        InvalidRequest: names the field, its value and what is allowed.
    """
    try:
        # Refuses, unlike the standard library's reader, what is no JSON: NaN, half surrogates and
        # nesting without end.
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", "no JSON", f"must be JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidRequest("body", type(value).__name__, "must be a JSON object")
    try:
        return asked.model_validate(value)
    except ValidationError as error:
        raise _refusal(asked, error) from None


def _refusal(asked: type[BaseModel], error: ValidationError) -> InvalidRequest:
    # Where a field may be one of two things, the one that was understood furthest is meant.
    first = max(error.errors(include_url=False), key=lambda item: len(item["loc"]))
    name = str(first["loc"][0]) if first["loc"] else ""
    known = asked.model_fields.get(name)
    if known is not None and known.description == REFUSED:
        return InvalidRequest(name, first["input"], "is not supported; leave it out")
    if name == "prompt" and first["type"] != "missing":
        return InvalidRequest(
            name, first["input"], "must be a text, token ids, or a list of either, none empty"
        )
    field = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(field, "nothing", "is required")
    if first["type"] == "none_required":
        return InvalidRequest(field, first["input"], "is not known; leave it out")
    message = first["msg"]
    return InvalidRequest(field, first["input"], message[0].lower() + message[1:])


def _path(location: tuple[int | str, ...]) -> str:
    """The place as a client writes it: `messages[0].role`."""
    path = ""
    for part in location:
        # Pydantic names the branches of a field that may be several things too; a path has none.
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}" if path else part
    return path or "body"
