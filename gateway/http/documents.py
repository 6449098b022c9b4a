"""What /openapi.json says beyond the routes: bodies, streams, and everything that can go wrong.

The bodies are read by `gateway.http.body`, within bounds and with OpenAI's errors, so that their
schemas are put in here from the models that it checks them by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from gateway.http.shapes import ErrorAnswer, Shape, Status

_REFERENCE = "#/components/schemas/{model}"

Responses = dict[int | str, dict[str, Any]]


def _errors(**meanings: str) -> Responses:
    return {
        int(status.removeprefix("s")): {"model": ErrorAnswer, "description": meaning}
        for status, meaning in meanings.items()
    }


_KEY = {"s401": "No API key, or an unknown one."}
_ASKED = {
    "s400": "A field is not known, not supported, or out of its limits.",
    "s404": "The model is not served.",
    "s408": "The body did not arrive in time.",
    "s413": "The body is too large.",
    "s503": "No target serves at the moment; Retry-After says when to try again.",
}
MODEL_ERRORS = _errors(**_KEY, s404="The model is not served.")
METRICS_ERRORS = _errors(**_KEY)
TOKEN_ERRORS = _errors(**_KEY, **_ASKED)
ANSWER_ERRORS = _errors(
    **_KEY,
    **_ASKED,
    s409="The target is in no state to answer.",
    s429="Too many requests are under way; Retry-After says when to try again.",
    s500="A mistake of ours, which is in the log.",
    s504="The request's time is over.",
)
NOT_READY: Responses = {503: {"model": Status, "description": "No target serves."}}


def asks(model: type[BaseModel]) -> dict[str, Any]:
    """The route's `openapi_extra` for a body of this kind."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def streams(whole: type[Shape]) -> dict[str, Any]:
    """An answer that comes whole, or as server-sent events where stream is true."""
    return {
        "model": whole,
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "string",
                    "description": "Chunks as JSON, one an event; the last event is [DONE].",
                }
            }
        },
    }


def document(app: FastAPI, asked: Sequence[type[BaseModel]]) -> None:
    """Serve the schema at /openapi.json; `asked` are all that routes ask for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, asked)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI, asked: Sequence[type[BaseModel]]) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    components = schema["components"]["schemas"]
    for model in asked:
        found = model.model_json_schema(ref_template=_REFERENCE)
        components |= found.pop("$defs", {})
        components[model.__name__] = found
    # What FastAPI would say of a wrong path, which no path of ours can be.
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return schema
