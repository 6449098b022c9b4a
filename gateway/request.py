"""A request once it has been checked: nothing in it can be out of range any more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flashduet.sampling.params import Sampling


class SpeculationMode(Enum):
    """Who chooses the block length of a round."""

    AUTO = "auto"
    FIXED = "fixed"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request is drafted; `block_length` counts the anchor and the draft tokens.

    FIXED drafts blocks of `block_length`, AUTO at most so long; None is the drafter's own. With
    `drafter_only` nothing is copied from the text.
    """

    mode: SpeculationMode
    block_length: int | None = None
    drafter_only: bool = False


class Priority(Enum):
    """Which class of requests the engine serves first."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """What is to be answered, and how.

    Attributes:
        request_id: the client's, or minted.
        model: name of the served model.
        prompt_ids: at least one token, all of them within the vocabulary.
        max_tokens: of the answer; prompt and answer fit the context window.
        sampling: its seed is the request's, or was drawn for it.
        stops: non-empty strings that the answer ends before.
        stop_ids: token ids that end the answer.
        choices: answers wanted; they differ by their noise.
        top_logprobs: most likely tokens to tell with each chosen one; None: no logprobs at all.
        cache_salt: only requests of the same salt share work on a common prefix.
        echo: the prompt's text, which every answer's text begins with; empty: none was asked for.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    speculation: Speculation
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include_special_tokens: bool = False
    choices: int = 1
    top_logprobs: int | None = None
    priority: Priority = Priority.INTERACTIVE
    cache_salt: str = ""
    echo: str = ""
