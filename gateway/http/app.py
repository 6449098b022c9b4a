"""The routes, over one gateway, and who may use them."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.security import HTTPBearer

from flashduet import __version__
from gateway.api_keys import ApiKeys
from gateway.gateway import Gateway
from gateway.http.answer_routes import answer_routes
from gateway.http.chat_request import ChatCompletionRequest
from gateway.http.completion_request import CompletionRequest
from gateway.http.documents import METRICS_ERRORS, document
from gateway.http.errors import handle_errors
from gateway.http.status_routes import model_routes, probe_routes
from gateway.http.token_routes import DetokenizeRequest, TokenizeRequest, token_routes
from gateway.metrics import CONTENT_TYPE, GatewayMetrics
from gateway.settings import GatewaySettings

_ASKED = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_DESCRIPTION = "OpenAI's API, answered with speculative decoding that does not change the answers."


def create_app(gateway: Gateway, settings: GatewaySettings, keys: ApiKeys) -> FastAPI:
    """The HTTP side; its figures are of all requests of the gateway, also those over gRPC."""
    app = FastAPI(
        title="Flashduet",
        description=_DESCRIPTION,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        # A path with a slash too many is another path, not a reason to send a body twice.
        redirect_slashes=False,
    )
    app.include_router(probe_routes(gateway))
    guarded = [Security(_Guard(keys))] if keys.required else []
    metrics = GatewayMetrics(gateway)
    for router in (
        answer_routes(gateway, settings),
        model_routes(gateway),
        token_routes(gateway, settings),
        _metrics_route(metrics),
    ):
        app.include_router(router, dependencies=guarded)
    handle_errors(app)
    document(app, _ASKED)
    origins = [part.strip() for part in settings.http_cors_origins.split(",") if part.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


class _Guard(HTTPBearer):
    """Lets callers pass who show a key; the schema says that one is needed."""

    def __init__(self, keys: ApiKeys) -> None:
        super().__init__(scheme_name="ApiKey", auto_error=False)
        self._keys = keys

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        self._keys.check(request.headers.get("authorization"))


def _metrics_route(metrics: GatewayMetrics) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get(
        "/metrics",
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **METRICS_ERRORS,
        },
        response_class=Response,
    )
    async def read_metrics() -> Response:
        """Figures of all requests since the start, for Prometheus."""
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return router
