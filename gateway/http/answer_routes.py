"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from fastapi.responses import Response

from flashduet.v1 import gateway_pb2 as pb
from gateway.gateway import Gateway
from gateway.http import chat_request, completion_request
from gateway.http.answering import REQUEST_ID, Wishes, answer
from gateway.http.answers import Answers
from gateway.http.body import parse, read_body
from gateway.http.chat_request import ChatCompletionRequest
from gateway.http.chat_writer import ChatWriter
from gateway.http.completion_request import CompletionRequest
from gateway.http.completion_writer import CompletionWriter
from gateway.http.documents import ANSWER_ERRORS, asks, streams
from gateway.http.fields import AnswerRequest
from gateway.http.serving import serving
from gateway.http.shapes import ChatCompletion, Completion
from gateway.http.totals import Totals
from gateway.settings import GatewaySettings


def answer_routes(gateway: Gateway, settings: GatewaySettings) -> APIRouter:
    router = APIRouter(tags=["answers"])

    @router.post(
        "/v1/chat/completions",
        openapi_extra=asks(ChatCompletionRequest),
        responses={200: streams(ChatCompletion), **ANSWER_ERRORS},
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        asked = parse(ChatCompletionRequest, await read_body(request, settings.http_max_body_bytes))
        (_, tokenizer), name = serving(gateway, asked.model), _request_name(request)
        message = chat_request.to_generate(asked, tokenizer.defaults, name)
        totals = Totals(prompts=1, choices=asked.n or 1)
        writer = ChatWriter(
            f"chatcmpl-{_bare(name)}", asked.model, totals, logprobs=bool(asked.logprobs)
        )
        answers = _start(gateway, settings, request, [message])
        return await answer(request, answers, writer, _wishes(asked, settings))

    @router.post(
        "/v1/completions",
        openapi_extra=asks(CompletionRequest),
        responses={200: streams(Completion), **ANSWER_ERRORS},
    )
    async def completions(request: Request) -> Response:
        """Go on from texts or tokens, without a chat template."""
        asked = parse(CompletionRequest, await read_body(request, settings.http_max_body_bytes))
        (_, tokenizer), name = serving(gateway, asked.model), _request_name(request)
        messages = completion_request.to_generates(
            asked, tokenizer.defaults, name, settings.http_max_prompts
        )
        if len(messages) > 1:
            # A stream's status is chosen before its last prompts are looked at.
            for message in messages:
                await gateway.check(message)
        totals = Totals(prompts=len(messages), choices=asked.n or 1)
        special = asked.skip_special_tokens is False
        writer = CompletionWriter(
            f"cmpl-{_bare(name)}",
            asked.model,
            totals,
            logprobs=asked.logprobs is not None,
            in_text=lambda token_id: bool(
                tokenizer.decode([token_id], include_special_tokens=special)
            ),
        )
        answers = _start(gateway, settings, request, messages)
        return await answer(request, answers, writer, _wishes(asked, settings))

    return router


def _start(
    gateway: Gateway,
    settings: GatewaySettings,
    request: Request,
    messages: list[pb.GenerateRequest],
) -> Answers:
    choices = max(messages[0].n, 1)
    return Answers(
        gateway,
        messages,
        traceparent=request.headers.get("traceparent", ""),
        at_once=max(1, min(settings.http_prompts_at_once, gateway.max_requests // choices)),
        deadline_s=settings.default_deadline_s,
    )


def _wishes(asked: AnswerRequest, settings: GatewaySettings) -> Wishes:
    return Wishes(
        stream=bool(asked.stream),
        usage=asked.include_usage,
        meta_info=bool(asked.return_meta_info),
        keepalive_s=settings.http_keepalive_s,
    )


def _request_name(request: Request) -> str:
    return request.headers.get(REQUEST_ID) or f"req-{secrets.token_hex(16)}"


def _bare(name: str) -> str:
    return name.removeprefix("req-")
