"""The toy pair behind HTTP, with the clients that its tests need."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fastapi import FastAPI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from gateway.api_keys import ApiKeys
from gateway.http import HttpServer, create_app
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenizer
from tests.support.tiny import IM_END
from tests.unit.toy_model import ids_of
from tests.unit.toy_stack import ToyStack, toy_stack

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Http:
    """The toy pair behind HTTP, with both kinds of client."""

    stack: ToyStack
    app: FastAPI
    sdk: openai.AsyncOpenAI
    raw: httpx.AsyncClient

    def script(self, text: str) -> str:
        """Let the target say this, and end."""
        self.stack.target.script = [*ids_of(text), IM_END]
        return text

    async def chat(self, **fields: Any) -> ChatCompletion:
        fields = {"model": "toy", "messages": HELLO, "max_tokens": 20, **fields}
        return await self.sdk.chat.completions.create(**fields)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Completion:
        fields = {"model": "toy", "prompt": prompt, "max_tokens": 20, **fields}
        return await self.sdk.completions.create(**fields)

    async def post(self, **fields: Any) -> httpx.Response:
        """A chat, whose fields are sent as they are."""
        return await self.send(CHAT, {"messages": HELLO, **fields})

    async def post_completion(self, **fields: Any) -> httpx.Response:
        return await self.send(COMPLETIONS, {"prompt": "hello", **fields})

    async def send(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        body = json.dumps({"model": "toy", "max_tokens": 20, **fields})
        headers = {"content-type": "application/json"}
        return await self.raw.post(path, content=body, headers=headers)


@asynccontextmanager
async def serve_http(tokenizer: Tokenizer, **settings: Any) -> AsyncIterator[Http]:
    """Everything up; settings of the gateway may be given."""
    settings = {"max_requests": 4, **settings}
    async with toy_stack(tokenizer, **settings) as stack:
        loaded = GatewaySettings.load(**settings)
        app = create_app(stack.gateway, loaded, ApiKeys.load(loaded))
        server = HttpServer(app, shutdown_grace_s=1)
        await server.start("127.0.0.1:0")
        url = f"http://127.0.0.1:{server.port}"
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        async with sdk, httpx.AsyncClient(base_url=url, timeout=60) as raw:
            yield Http(stack, app, sdk, raw)
        await server.stop()


def events(response: httpx.Response) -> list[str]:
    """The data of each server-sent event."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = response.text.split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def pieces(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream that ended well."""
    *found, done = events(response)
    assert done == "[DONE]"
    return [json.loads(piece) for piece in found]


def texts(streamed: Sequence[dict[str, Any]], choices: int = 1) -> list[str]:
    """What a stream's pieces add up to, of each choice."""
    said = [""] * choices
    for piece in streamed:
        for choice in piece["choices"]:
            delta = choice.get("delta")
            text = choice["text"] if delta is None else delta.get("content", "")
            said[choice["index"]] += text
    return said
