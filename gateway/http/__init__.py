"""The OpenAI-compatible side of the gateway."""

from gateway.http.app import create_app
from gateway.http.server import HttpServer

__all__ = ["HttpServer", "create_app"]
