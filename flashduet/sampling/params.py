"""A request's sampling parameters, checked once. No torch here: the gateway and clients use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashduet.errors import InvalidRequest
from flashduet.sampling.logit_bias import NO_BIAS, LogitBias
from flashduet.v1.common_pb2 import SamplingParams

# Above this every model's distribution is flat for all purposes; larger values are typing errors.
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**32 - 1
MAX_SEED = 2**64 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen; immutable, hashable, and valid once it exists.

    Attributes:
        temperature: divides the logits, 0 to MAX_TEMPERATURE; 0 is greedy.
        top_p: probability mass kept, in (0, 1]; 1 keeps all.
        top_k: number of most likely tokens kept; 0 keeps all.
        min_p: tokens less likely than this times the most likely one are dropped, in [0, 1].
        seed: key of the noise, 64 bits unsigned.
        presence_penalty: taken from the logit of each token that the answer has, in [-2, 2].
        frequency_penalty: the same, times how often the answer has it, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of the tokens that the
            prompt or the answer has, in (0, 10]; 1 changes nothing.
        logit_bias: added to the logits of token ids; any mapping is taken and kept as a LogitBias.

    Raises:
        InvalidRequest: on construction, naming the field as "sampling.<name>".
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = NO_BIAS

    def __post_init__(self) -> None:
        _check(self, "sampling")
        if not isinstance(self.logit_bias, LogitBias):
            try:
                bias = LogitBias(self.logit_bias)
            except ValueError as error:
                raise InvalidRequest("sampling.logit_bias", self.logit_bias, str(error)) from None
            object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        """True when no noise is drawn and the filters can make no difference."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """True when the tokens so far change the logits: a TokenHistory has to be kept."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def penalized(self) -> bool:
        """True when the choice is made from other logits than the model's own."""
        return self.needs_history or len(self.logit_bias) > 0

    def check_vocabulary(self, vocab_size: int, prefix: str = "sampling") -> None:
        """Refuse a bias on a token that the model does not have.

        Raises:
            InvalidRequest: naming "<prefix>.logit_bias".
        """
        largest = max(self.logit_bias, default=0)
        if largest >= vocab_size:
            limit = f"must have token ids below the vocabulary's size, {vocab_size}"
            raise InvalidRequest(f"{prefix}.logit_bias", largest, limit)

    @classmethod
    def from_proto(cls, message: SamplingParams, prefix: str = "sampling") -> Sampling:
        """The message's values; absent fields get their defaults.

        Raises:
            InvalidRequest: naming the field as "<prefix>.<name>".
        """
        given: dict[str, Any] = {
            name: getattr(message, name) for name in _NAMES if message.HasField(name)
        }
        if message.logit_bias:
            given["logit_bias"] = dict(message.logit_bias)
        try:
            return cls(**given)
        except InvalidRequest as error:
            name = error.field.rpartition(".")[2]
            raise InvalidRequest(f"{prefix}.{name}", given[name], error.limit) from None

    def to_proto(self) -> SamplingParams:
        """Every field set, so that the reader's defaults play no part."""
        return SamplingParams(
            logit_bias=self.logit_bias, **{name: getattr(self, name) for name in _NAMES}
        )


_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _check(sampling: Sampling, prefix: str) -> None:
    def number(name: str, limit: str) -> float:
        value = getattr(sampling, name)
        # NaN fails every comparison, so it is refused here before a range can let it through.
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise InvalidRequest(f"{prefix}.{name}", value, limit)
        return value

    def integer(name: str, largest: int, limit: str) -> None:
        value = getattr(sampling, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
            raise InvalidRequest(f"{prefix}.{name}", value, limit)

    limit = f"must be a finite number from 0 to {MAX_TEMPERATURE:g}"
    if not 0 <= number("temperature", limit) <= MAX_TEMPERATURE:
        raise InvalidRequest(f"{prefix}.temperature", sampling.temperature, limit)
    limit = "must be above 0 and at most 1"
    if not 0 < number("top_p", limit) <= 1:
        raise InvalidRequest(f"{prefix}.top_p", sampling.top_p, limit)
    integer("top_k", MAX_TOP_K, f"must be a whole number from 0 (keep all) to {MAX_TOP_K}")
    limit = "must be from 0 to 1"
    if not 0 <= number("min_p", limit) <= 1:
        raise InvalidRequest(f"{prefix}.min_p", sampling.min_p, limit)
    integer("seed", MAX_SEED, "must be a whole number from 0 to 2^64 - 1")
    limit = f"must be from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= number(name, limit) <= MAX_PENALTY:
            raise InvalidRequest(f"{prefix}.{name}", getattr(sampling, name), limit)
    limit = f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}"
    if not 0 < number("repetition_penalty", limit) <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(f"{prefix}.repetition_penalty", sampling.repetition_penalty, limit)
