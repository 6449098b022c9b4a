"""GET /health, /ready and /v1/models: what lives, and what is served."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from flashduet.errors import UnknownModel
from gateway.gateway import Gateway
from gateway.http.documents import MODEL_ERRORS, NOT_READY
from gateway.http.shapes import Model, ModelList, Status, json_response
from gateway.router import ServedModel


def probe_routes(gateway: Gateway) -> APIRouter:
    """What orchestrators ask; it says nothing that a stranger may not know."""
    router = APIRouter(tags=["status"])

    @router.get("/health", response_model=Status)
    async def health() -> Response:
        """Whether this process lives."""
        return json_response(Status(status="ok"))

    @router.get("/ready", response_model=Status, responses=NOT_READY)
    async def ready() -> Response:
        """Whether a request could be answered: a target serves."""
        if gateway.served() is None:
            return json_response(Status(status="unavailable"), 503, {"retry-after": "1"})
        return json_response(Status(status="ok"))

    return router


def model_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", response_model=ModelList, responses=MODEL_ERRORS)
    async def models() -> Response:
        """The served model; none while no target serves."""
        served = gateway.served()
        return json_response(
            ModelList(object="list", data=[_model(served)] if served is not None else [])
        )

    @router.get("/v1/models/{name:path}", response_model=Model, responses=MODEL_ERRORS)
    async def model(name: str) -> Response:
        """The served model, if it has this name."""
        served = gateway.served()
        if served is None or served.name != name:
            raise UnknownModel(name, served.name if served is not None else "")
        return json_response(_model(served))

    return router


def _model(served: ServedModel) -> Model:
    return Model(
        id=served.name,
        object="model",
        created=served.created,
        owned_by="flashduet",
        max_model_len=served.context_window,
        drafter=served.drafter or None,
        block_length=served.block_length or None,
    )
