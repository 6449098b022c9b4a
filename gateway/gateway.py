"""The gateway itself, whatever protocol a request came by: admits, routes, answers, frees."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flashduet.errors import (
    Cancelled,
    DeadlineExceeded,
    FlashduetError,
    Overloaded,
    Unavailable,
    internal_error,
)
from flashduet.v1 import gateway_pb2 as pb
from gateway.admission import Limits, admit
from gateway.answer import Answer
from gateway.controller import BlockController
from gateway.decode import decode
from gateway.drafter import Drafter
from gateway.request import SpeculationMode, ValidRequest
from gateway.router import Route, Router, ServedModel
from gateway.session import Session
from gateway.settings import GatewaySettings
from gateway.tally import Tally
from gateway.tokenization import Tokenizer

logger = logging.getLogger(__name__)

Emit = Callable[[pb.GenerateResponse], Awaitable[None]]

_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class RequestCounts:
    """How requests went since the start, and how many are under way."""

    active: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class Gateway:
    """Owns the requests under way; every one of them frees all it holds however it ends."""

    def __init__(self, settings: GatewaySettings, router: Router) -> None:
        self.counts = RequestCounts()
        self.tokenizer: Tokenizer | None = None
        self._settings = settings
        self._router = router
        self._limits = Limits.of(settings)

    @property
    def max_requests(self) -> int:
        return self._settings.max_requests

    def served(self) -> ServedModel | None:
        """The served model; None while the gateway could not answer a request."""
        return self._router.served() if self.tokenizer is not None else None

    def most_tokens(self, served: ServedModel) -> int:
        return self._limits.most_tokens(served)

    async def answer(
        self,
        message: pb.GenerateRequest,
        emit: Emit,
        *,
        traceparent: str = "",
        time_left_s: float | None = None,
    ) -> None:
        """Answer a request: Started, any number of Chunk, then Complete go to `emit`.

        `emit` may take its time: a slow reader holds up its own request and no other. To cancel
        the request, cancel the task that runs this.

        Args:
            message: as the client sent it, unchecked.
            emit: awaited for each response in turn.
            traceparent: of the client's span, if it sent one.
            time_left_s: the client's deadline; the gateway's own applies besides.

        Raises:
            InvalidRequest: a field is out of its limits.
            Overloaded: here or at the target.
            DeadlineExceeded, Unavailable: everything has been freed.
            FlashduetError: the fault is ours; the log has it.
        """
        deadline = time.monotonic() + min(
            self._settings.default_deadline_s,
            time_left_s if time_left_s is not None else float("inf"),
        )
        counts = self.counts
        if counts.active >= self._settings.max_requests:
            counts.failed += 1
            raise Overloaded(
                f"{counts.active} requests are under way, which is the most", _RETRY_AFTER_S
            )
        counts.active += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._answer(message, emit, traceparent, deadline)
            counts.completed += 1
        except TimeoutError:
            counts.failed += 1
            raise DeadlineExceeded("the request's time is over") from None
        except (asyncio.CancelledError, Cancelled):
            counts.cancelled += 1
            raise
        except FlashduetError:
            counts.failed += 1
            raise
        except Exception as error:
            counts.failed += 1
            logger.exception("a request failed")
            raise internal_error() from error
        finally:
            counts.active -= 1

    async def _answer(
        self, message: pb.GenerateRequest, emit: Emit, traceparent: str, deadline: float
    ) -> None:
        tally = Tally()
        with tally.request(traceparent) as trace:
            with trace.phase("admit"):
                request, tokenizer = await self._admit(message)
                session_id = secrets.token_bytes(16)
                trace.note(session=session_id.hex(), request_id=request.request_id)
            await emit(
                pb.GenerateResponse(
                    started=pb.GenerateStarted(
                        request_id=request.request_id,
                        model=request.model,
                        prompt_tokens=len(request.prompt_ids),
                        trace_id=trace.trace_id,
                        seed=request.sampling.seed,
                    )
                )
            )
            with contextlib.closing(
                self._open(session_id, request, tokenizer, tally, deadline)
            ) as session:
                await decode(session, trace, lambda chunk: emit(pb.GenerateResponse(chunk=chunk)))
                await session.finish()
            await emit(pb.GenerateResponse(complete=_complete(session)))
            trace.note(rounds=tally.rounds, tokens=session.answer.tokens)

    async def _admit(self, message: pb.GenerateRequest) -> tuple[ValidRequest, Tokenizer]:
        tokenizer, served = self.tokenizer, self.served()
        if tokenizer is None or served is None:
            raise Unavailable("no target serves at the moment", _RETRY_AFTER_S)
        return await admit(message, served, tokenizer, self._limits), tokenizer

    def _open(
        self,
        session_id: bytes,
        request: ValidRequest,
        tokenizer: Tokenizer,
        tally: Tally,
        deadline: float,
    ) -> Session:
        route = self._router.route(drafted=request.speculation.mode is not SpeculationMode.OFF)
        if route is None:
            raise Unavailable("no target serves at the moment", _RETRY_AFTER_S)
        detokenizer = tokenizer.detokenizer(include_special_tokens=request.include_special_tokens)
        answer = Answer(request, detokenizer)
        drafter = _drafter(session_id, request, route, tally)
        return Session(
            session_id=session_id,
            request=request,
            deadline=deadline,
            # Last, for it holds a stream from the start, which only the whole session frees.
            target=route.target.session(),
            drafter=drafter,
            answer=answer,
            tally=tally,
        )


def _drafter(session_id: bytes, request: ValidRequest, route: Route, tally: Tally) -> Drafter:
    if route.draft is None or route.pair is None:
        return Drafter(None, None, tally, route.undrafted)
    session = route.draft.session(
        session_id, route.target_instance_id, request.sampling, len(request.prompt_ids)
    )
    controller = BlockController(route.pair, request.speculation, route.block_length)
    return Drafter(session, controller, tally, "")


def _complete(session: Session) -> pb.GenerateComplete:
    answer, tally = session.answer, session.tally
    complete = pb.GenerateComplete(
        finish_reason=answer.finish_reason,
        usage=pb.Usage(
            prompt_tokens=len(session.request.prompt_ids),
            completion_tokens=answer.tokens,
            cached_tokens=tally.cached_tokens,
        ),
        speculation=tally.stats(answer.tokens),
    )
    if isinstance(answer.stop, str):
        complete.stop_string = answer.stop
    elif answer.stop is not None:
        complete.stop_token_id = answer.stop
    return complete
