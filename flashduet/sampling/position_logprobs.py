"""How likely the model held a token and its rivals. No torch here: the gateway uses it."""

from __future__ import annotations

from dataclasses import dataclass

from flashduet.v1 import common_pb2

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id and the natural logarithm of its probability."""

    token_id: int
    logprob: float

    def to_proto(self) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(token_id=self.token_id, logprob=self.logprob)

    @classmethod
    def from_proto(cls, message: common_pb2.TokenLogprob) -> TokenLogprob:
        return cls(message.token_id, message.logprob)


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """One position of an answer, by the raw model: before penalties, temperature, filters, noise.

    Attributes:
        chosen: the token that was emitted.
        top: the most likely tokens, best first, equal ones by id; as many as were asked for, or as
            the model holds possible at all.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()

    def to_proto(self) -> common_pb2.PositionLogprobs:
        return common_pb2.PositionLogprobs(
            chosen=self.chosen.to_proto(), top=[entry.to_proto() for entry in self.top]
        )

    @classmethod
    def from_proto(cls, message: common_pb2.PositionLogprobs) -> PositionLogprobs:
        return cls(
            TokenLogprob.from_proto(message.chosen),
            tuple(TokenLogprob.from_proto(entry) for entry in message.top),
        )
