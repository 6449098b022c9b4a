"""What the requests of all routes have in common: strictness, limits, sampling, extensions.

Every field is of one of three kinds. Those that are used have their own type and range. Those that
cannot change the answer are accepted and ignored. Those that would change it and that we do not
have are refused by name unless they hold the value that means "not used". Anything else is unknown
and refused too, since an option that is silently ignored is a wrong answer.

The models are also the schema that /openapi.json shows, so that it cannot differ from what is done.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from flashduet.sampling.params import MAX_PENALTY, MAX_REPETITION_PENALTY, MAX_TEMPERATURE
from gateway.admission import MAX_STOP_CHARACTERS, MAX_STOP_IDS, MAX_STOPS

UINT32 = 2**32 - 1
MAX_LOGPROBS = 20
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024

HARMLESS = "Accepted and ignored: it cannot change the answer."
REFUSED = (
    "Not supported: it would change the answer. Only the value that means 'not used' is taken."
)
EXTENSION = "Not one of OpenAI's."


def _integral(value: object) -> object:
    """JSON has one kind of number: 1.0 is an integer, and some languages write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integral)]
TokenId = Annotated[Integer, Field(ge=0, le=UINT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
StopIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)]
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
# Tokens are named in JSON by their ids in decimal.
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
BiasValue = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Bias = Annotated[
    dict[BiasKey, BiasValue],
    Field(max_length=MAX_BIASED_TOKENS, json_schema_extra={"additionalProperties": False}),
]


class Strict(BaseModel):
    """Takes no value for another, and no field that it does not know.

    Null is "not given" everywhere in OpenAI's API, also in messages that clients echo, with fields
    of other servers.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    __pydantic_extra__: dict[str, None] = Field(init=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Any = Field(default=None, description=HARMLESS)


class SpeculationOptions(Strict):
    """How the request is drafted. It never changes the answer."""

    mode: Literal["auto", "fixed", "off"] | None = None
    block_length: Annotated[Integer, Field(ge=1, le=UINT32)] | None = Field(
        default=None, description="Anchor and draft tokens of a block."
    )
    drafter_only: bool | None = Field(
        default=None, description="Copy nothing from the text, to measure the drafter."
    )


class AnswerRequest(Strict):
    """What chat completions and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(
        default=None, description="Only together with stream."
    )
    max_tokens: Annotated[Integer, Field(ge=1, le=UINT32)] | None = None
    n: Annotated[Integer, Field(ge=1, le=128)] | None = None
    temperature: Temperature | None = Field(
        default=None, description="Absent: the checkpoint's own, else 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # OpenAI's seeds are signed; a negative one stands for its 64-bit pattern.
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None

    # Extensions that other servers have too.
    # -1 is what some of them call 0: keep all.
    top_k: Annotated[Integer, Field(ge=-1, le=UINT32)] | None = Field(
        default=None, description=EXTENSION
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description=EXTENSION)
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] | None = Field(
        default=None, description=EXTENSION
    )
    stop_token_ids: StopIds | None = Field(default=None, description=EXTENSION)
    ignore_eos: bool | None = Field(default=None, description=EXTENSION)
    skip_special_tokens: bool | None = Field(default=None, description=EXTENSION)
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description=f"{EXTENSION} Prompts are shared only under the same salt."
    )
    return_meta_info: bool | None = Field(
        default=None, description=f"{EXTENSION} Adds SGLang's meta_info to the answer."
    )
    priority: Literal["interactive", "batch"] | None = Field(default=None, description=EXTENSION)
    speculation: SpeculationOptions | None = Field(default=None, description=EXTENSION)

    service_tier: str | None = Field(
        default=None, description="'flex' is answered as a batch request; others change nothing."
    )
    user: Any = Field(default=None, description=HARMLESS)
    metadata: Any = Field(default=None, description=HARMLESS)
    store: Any = Field(default=None, description=HARMLESS)
    safety_identifier: Any = Field(default=None, description=HARMLESS)
    prompt_cache_key: Any = Field(default=None, description=HARMLESS)
    prompt_cache_retention: Any = Field(default=None, description=HARMLESS)

    best_of: Literal[1] | None = Field(default=None, description=REFUSED)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []
