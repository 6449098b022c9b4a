"""POST /tokenize and /detokenize: what the served model's tokenizer makes of texts and ids."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from flashduet.errors import InvalidRequest
from flashduet.v1 import gateway_pb2 as pb
from gateway.gateway import Gateway
from gateway.http.body import parse, read_body
from gateway.http.chat_request import RequestMessage, chat
from gateway.http.documents import TOKEN_ERRORS, asks
from gateway.http.fields import Strict, TokenId
from gateway.http.logprobs import token_text
from gateway.http.serving import serving
from gateway.http.shapes import Detokenized, Tokenized, json_response
from gateway.prompt import prompt
from gateway.settings import GatewaySettings


class TokenizeRequest(Strict):
    """Exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = Field(default=None, description="A text.")
    messages: Annotated[list[RequestMessage], Field(fail_fast=True, min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool | None = Field(default=None, description="Absent: false.")


def token_routes(gateway: Gateway, settings: GatewaySettings) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post(
        "/tokenize",
        openapi_extra=asks(TokenizeRequest),
        response_model=Tokenized,
        responses=TOKEN_ERRORS,
    )
    async def tokenize(request: Request) -> Response:
        """Ids of a text or of a chat, as an answer to it would begin from."""
        asked = parse(TokenizeRequest, await read_body(request, settings.http_max_body_bytes))
        served, tokenizer = serving(gateway, asked.model)
        if asked.prompt == "":  # No prompt to answer, and yet a text with so many tokens.
            ids = tuple(await tokenizer.encode_text(""))
        else:
            _, ids = await prompt(_message(asked), served, tokenizer)
        found = Tokenized(count=len(ids), max_model_len=served.context_window, tokens=list(ids))
        if asked.return_token_strs:
            found.token_strs = [token_text(tokenizer.token_bytes(token_id)) for token_id in ids]
        return json_response(found)

    @router.post(
        "/detokenize",
        openapi_extra=asks(DetokenizeRequest),
        response_model=Detokenized,
        responses=TOKEN_ERRORS,
    )
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        asked = parse(DetokenizeRequest, await read_body(request, settings.http_max_body_bytes))
        served, tokenizer = serving(gateway, asked.model)
        if asked.tokens and max(asked.tokens) >= served.vocab_size:
            raise InvalidRequest("tokens", max(asked.tokens), f"must be below {served.vocab_size}")
        text = tokenizer.decode(asked.tokens, include_special_tokens=not asked.skip_special_tokens)
        return json_response(Detokenized(prompt=text))

    return router


def _message(asked: TokenizeRequest) -> pb.GenerateRequest:
    if (asked.prompt is None) == (asked.messages is None):
        given = "neither" if asked.prompt is None else "both"
        raise InvalidRequest("prompt", given, "exactly one of prompt and messages is needed")
    message = pb.GenerateRequest()
    if asked.messages is not None:
        chat(message, asked.messages, asked.chat_template_kwargs)
    else:
        message.text = asked.prompt or ""
    return message
