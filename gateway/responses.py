"""What a client is told at the beginning and at the ends of its answers."""

from __future__ import annotations

from collections.abc import Sequence

from flashduet.v1 import gateway_pb2 as pb
from gateway.answer import Answer
from gateway.request import ValidRequest
from gateway.session import Session
from gateway.tally import Phase, Tally


def started(request: ValidRequest, trace: Phase) -> pb.GenerateResponse:
    """The first response of a request."""
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id=request.request_id,
            model=request.model,
            prompt_tokens=len(request.prompt_ids),
            trace_id=trace.trace_id,
            seed=request.sampling.seed,
        )
    )


def complete(sessions: Sequence[Session], tally: Tally) -> pb.GenerateResponse:
    """The last response of a request; `tally` is of all its answers together."""
    first, tokens = sessions[0].answer, sum(session.answer.tokens for session in sessions)
    message = pb.GenerateComplete(
        finish_reason=first.finish_reason,
        usage=pb.Usage(
            prompt_tokens=len(sessions[0].request.prompt_ids),
            completion_tokens=tokens,
            cached_tokens=tally.cached_tokens,
        ),
        speculation=tally.stats(tokens - len(sessions)),
    )
    _tell_stop(message, first)
    return pb.GenerateResponse(complete=message)


def _tell_stop(message: pb.GenerateComplete | pb.GenerateFinished, answer: Answer) -> None:
    if isinstance(answer.stop, str):
        message.stop_string = answer.stop
    elif answer.stop is not None:
        message.stop_token_id = answer.stop


def finished(answer: Answer) -> pb.GenerateResponse:
    """The last response of one answer."""
    message = pb.GenerateFinished(
        choice=answer.choice,
        finish_reason=answer.finish_reason,
        completion_tokens=answer.tokens,
    )
    _tell_stop(message, answer)
    return pb.GenerateResponse(finished=message)
