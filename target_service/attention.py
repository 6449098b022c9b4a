"""The one attention function of all families, put into Transformers' attention interface.

A model's layer calls it with queries, keys and values of a packed row of tokens and with what its
family needs: scaling, softcap, sinks. What they attend to is the business of the pass that is going
on in this thread: a packed one over the paged store, or the survey that finds out, before the first
pass, which layers there are and what each of them hands over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

# Without a mask function Transformers makes no masks at all: every pass brings its own.
# No "flash" in the names: Transformers would look for such a kernel.
PACKED = "fd_packed_rows"
SURVEY = "fd_survey"
# The attention of a graph that a compiler made, `torch.ops.flashduet.attend`.
_OPERATOR = "attend"


@dataclass(frozen=True, slots=True)
class Extras:
    """What a family adds to plain attention, as its layer hands it over.

    Attributes:
        scaling: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [heads], a logit of each head that takes part in the softmax and carries no value.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class AttentionPass(Protocol):
    """One forward pass of a model, as seen by its attention layers."""

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, extras: Extras, mask: Any
    ) -> Tensor:
        """Queries [1, heads, n, size], keys and values [1, kv_heads, n, ..] of the row's tokens.

        Returns [1, n, heads, value_size].
        """


class IndexedPass(Protocol):
    """A pass whose layers are known by their place among the attention layers."""

    def attend_at(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras
    ) -> Tensor:
        """As `AttentionPass.attend`; contiguous."""


_thread = threading.local()


@contextmanager
def running(current: AttentionPass | IndexedPass) -> Iterator[None]:
    """Let attention layers called in this thread take part in this pass."""
    _thread.current = current
    try:
        yield
    finally:
        _thread.current = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if position_bias is not None:
        raise ValueError("attention with a position bias is not supported")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    current: AttentionPass = _thread.current
    extras = Extras(scaling, softcap, s_aux)
    return current.attend(module, query, key, value, extras, attention_mask), None


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Handed to layers in place of a mask while they are surveyed."""

    function: Callable[..., Tensor]


def _note_mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> MaskRequest:
    return MaskRequest(mask_function)


def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    index: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    current: IndexedPass = _thread.current
    return current.attend_at(index, query, key, value, Extras(scaling, softcap, sinks))


def _operator_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


# Kept: an operator is gone with the library that defines it.
_library = torch.library.Library("flashduet", "DEF")
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int index, "
    "float scaling, float? softcap) -> Tensor"
)
# The first gives way to a native kernel (target_service.compiled.library), which calls the second
# for a pass that is not its own.
for _name in (_OPERATOR, f"{_OPERATOR}_in_python"):
    _library.define(_name + _SCHEMA)
    _library.impl(_name, _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashduet::{_name}", _operator_shape, lib=_library)

AttentionInterface.register(PACKED, _attention)
AttentionInterface.register(SURVEY, _attention)
AttentionMaskInterface.register(SURVEY, _note_mask)
