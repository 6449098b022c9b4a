"""The gateway itself, whatever protocol a request came by: admits, routes, answers, frees."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from flashduet.errors import (
    Cancelled,
    DeadlineExceeded,
    FlashduetError,
    Overloaded,
    Unavailable,
    internal_error,
)
from flashduet.v1 import gateway_pb2 as pb
from gateway import responses
from gateway.admission import Limits, admit, choices, priority
from gateway.answer import Answer
from gateway.controller import BlockController
from gateway.decode import decode
from gateway.drafter import Drafter
from gateway.outbox import Emit, Outbox
from gateway.outcome import RequestCounts, RequestEnd, watched
from gateway.request import Priority, SpeculationMode, ValidRequest
from gateway.router import Route, Router, ServedModel
from gateway.session import Session
from gateway.settings import GatewaySettings
from gateway.tally import Phase, Tally
from gateway.tokenization import Tokenizer

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
# Plain steps that a batch request hears of together: each message costs both sides about a tenth
# of a millisecond, which many sessions at once feel and no one waits for.
_BATCH_STEPS = 16


class Gateway:
    """Owns the requests under way; every one of them frees all it holds however it ends."""

    def __init__(self, settings: GatewaySettings, router: Router) -> None:
        self.counts = RequestCounts()
        # Told of every request when it is over; none of them may raise or wait.
        self.observers: list[Callable[[RequestEnd], None]] = []
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
        """Answer a request: Started, Chunks, a Finished a choice, then Complete go to `emit`.

        `emit` is never called twice at once. It may take its time: a slow reader holds up its own
        request and no other. To cancel the request, cancel the task that runs this.

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
        started_at = time.monotonic()
        deadline = started_at + min(
            self._settings.default_deadline_s,
            time_left_s if time_left_s is not None else float("inf"),
        )
        end, counts, room = RequestEnd(), self.counts, 0
        try:
            room = self._take_room(message)
            async with asyncio.timeout(deadline - started_at):
                await self._answer(message, watched(emit, end, started_at), traceparent, deadline)
            end.outcome = "completed"
        except TimeoutError:
            end.error = DeadlineExceeded("the request's time is over")
            raise end.error from None
        except (asyncio.CancelledError, Cancelled):
            end.outcome = "cancelled"
            raise
        except FlashduetError as error:
            end.error = error
            raise
        except Exception as error:
            logger.exception("a request failed")
            end.error = internal_error()
            raise end.error from error
        finally:
            counts.active -= room
            setattr(counts, end.outcome, getattr(counts, end.outcome) + 1)
            end.seconds = time.monotonic() - started_at
            for observer in self.observers:
                observer(end)

    async def ask_itself(
        self, message: pb.GenerateRequest, route: Route, time_s: float
    ) -> pb.GenerateComplete:
        """Answer a request of the gateway's own, by these replicas.

        It is counted nowhere and has no trace, so that figures of requests are those of clients.

        Raises:
            TimeoutError: it took longer than `time_s`.
            FlashduetError: as `answer`.
        """
        complete = pb.GenerateComplete()

        async def keep(response: pb.GenerateResponse) -> None:
            if response.HasField("complete"):
                complete.CopyFrom(response.complete)

        async with asyncio.timeout(time_s):
            await self._answer(message, keep, None, time.monotonic() + time_s, route)
        return complete

    async def check(self, message: pb.GenerateRequest) -> None:
        """Refuse a request that could not be answered, without answering one that could.

        Raises:
            InvalidRequest: a field is out of its limits.
            Unavailable: nothing is served.
        """
        await self._admit(message)

    def _take_room(self, message: pb.GenerateRequest) -> int:
        """Count the request's answers as under way, and return how many they are."""
        active, wanted = self.counts.active, choices(message, self._limits)
        if active + wanted > self._settings.max_requests:
            raise Overloaded(
                f"{active} answers are under way, and {self._settings.max_requests} are the most",
                _RETRY_AFTER_S,
            )
        served = self.served()
        sessions = served.max_sessions if served is not None else self._settings.max_requests
        most = self._settings.most_batch_requests(sessions)
        if priority(message) is Priority.BATCH and active and active + wanted > most:
            raise Overloaded(
                f"{active} answers are under way, and batch requests leave room above {most}",
                _RETRY_AFTER_S,
            )
        self.counts.active += wanted
        return wanted

    async def _answer(
        self,
        message: pb.GenerateRequest,
        emit: Emit,
        traceparent: str | None,
        deadline: float,
        route: Route | None = None,
    ) -> None:
        tally = Tally()
        with tally.request(traceparent) as trace:
            with trace.phase("admit"):
                request, tokenizer = await self._admit(message)
                session_id = secrets.token_bytes(16)
                trace.note(session=session_id.hex(), request_id=request.request_id)
            async with Outbox(emit) as outbox:
                await outbox.put(responses.started(request, trace))
                with contextlib.ExitStack() as owned:
                    sessions = [
                        owned.enter_context(
                            contextlib.closing(
                                self._open(
                                    session_id if choice == 0 else secrets.token_bytes(16),
                                    request,
                                    tokenizer,
                                    choice,
                                    deadline,
                                    route,
                                )
                            )
                        )
                        for choice in range(request.choices)
                    ]
                    await _together([_one(session, trace, outbox) for session in sessions])
                tally.include([session.tally for session in sessions])
                await outbox.put(responses.complete(sessions, tally))
            trace.note(rounds=tally.rounds, tokens=sum(s.answer.tokens for s in sessions))

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
        choice: int,
        deadline: float,
        route: Route | None,
    ) -> Session:
        drafted = request.speculation.mode is not SpeculationMode.OFF
        route = route or self._router.route(drafted=drafted)
        if route is None:
            raise Unavailable("no target serves at the moment", _RETRY_AFTER_S)
        detokenizer = tokenizer.detokenizer(include_special_tokens=request.include_special_tokens)
        answer, tally = Answer(request, detokenizer, tokenizer.token_bytes, choice), Tally()
        drafter = _drafter(session_id, request, choice, route, tally)
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


def _drafter(
    session_id: bytes, request: ValidRequest, choice: int, route: Route, tally: Tally
) -> Drafter:
    at_once = _BATCH_STEPS if request.priority is Priority.BATCH else 1
    if route.draft is None or route.pair is None:
        return Drafter(None, None, tally, route.undrafted, at_once)
    session = route.draft.session(session_id, route.target_instance_id, request, choice)
    controller = BlockController(route.pair, request.speculation, route.block_length)
    return Drafter(session, controller, tally, "", at_once)


async def _one(session: Session, trace: Phase, outbox: Outbox) -> None:
    """Make one of a request's answers, and say how it ended."""
    await decode(
        session,
        trace.counted_by(session.tally),
        lambda chunk: outbox.put(pb.GenerateResponse(chunk=chunk)),
    )
    await session.finish()
    await outbox.put(responses.finished(session.answer))


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them all at once; the first that fails ends the others, and its error is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work, name="choice")
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
