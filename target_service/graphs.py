"""Decoding passes on a GPU, recorded once for each shape and then launched as a whole.

A decoding pass is thousands of small kernels; launched one by one from Python they take longer than
they run. A CUDA graph launches them all at once, but repeats them exactly: same shapes, same
memory. graph_inputs brings each step's numbers to where they read; what comes out is copied to
tensors that all recordings share, because the memory in between is shared too. Prefill chunks and
whatever else no shape holds run as they would without.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashduet.kv.storage import KVStorage
from target_service.attention import AttentionPass, Extras
from target_service.batching import Span
from target_service.features import FeatureCapture
from target_service.flash_varlen import (
    HOW_TO_HAVE_IT,
    VarlenFunction,
    VarlenPlan,
    attend_varlen,
    block_size,
    can_plan,
    varlen_function,
)
from target_service.graph_inputs import PassInputs, PassShape, ShapeRule, StaticInputs
from target_service.recorder import Recorder
from target_service.settings import TargetSettings
from target_service.survey import AttentionLayers
from target_service.visibility import Visibility

log = logging.getLogger(__name__)

# Rows of the largest recorded pass, where the budget has room for their logits.
MOST_ROWS = 256
# The driver keeps some MiB for each, which no budget here counts.
MOST_RECORDINGS = 64
# Of the budget, for logits: as much again is taken while they are computed.
_LOGITS_SHARE = 4
# What recording at start may take, seconds; the rest is recorded when it is first wanted.
_START_S = 5.0

# Ids [1, n], positions [1, n] and rows to keep [k], int64, to logits [k, V].
Model = Callable[[Tensor, Tensor, Tensor, AttentionPass], Tensor]


@dataclass(frozen=True, slots=True)
class Recordable:
    """A model, and all that its decoding passes touch.

    Attributes:
        run: the model over packed rows.
        hidden_size: of its layers' outputs.
        logits: [n, V] of any pass, for V and the element type.
        varlen: flash-attn's function: no other attention here keeps its shapes from step to step.
    """

    run: Model
    layers: AttentionLayers
    kv: KVStorage
    features: FeatureCapture
    varlen: VarlenFunction
    hidden_size: int
    logits: Tensor


def obstacle(settings: TargetSettings, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why passes are not recorded, if they are not; whether a model can be is found by trying."""
    if device.type != "cuda":
        return "there is no GPU"
    if not settings.cuda_graphs:
        return "FLASHDUET_TARGET_CUDA_GRAPHS is off"
    if settings.numerics == "batch_invariant":
        return "batch_invariant lays passes out in its own way"
    if varlen_function(device, block_size(settings, device, dtype), dtype) is None:
        return f"only flash-attn's function keeps its shapes; {HOW_TO_HAVE_IT}"
    return None


class CannotRecord(Exception):
    """This model's passes have shapes that hang on their numbers; says where."""


class GraphedPasses:
    """Runs passes from recordings. Belongs to one thread, as an engine does.

    Owns the tensors that recordings read and write, and the recordings: the least recently used
    one goes for a new one. A model that can't be recorded is found out by trying; then, or when
    memory runs out, everything is let go and `run` gives None from there on.

    Args:
        budget: bytes of the device's memory for it all.
    """

    def __init__(self, model: Recordable, recorder: Recorder, budget: int) -> None:
        self._model = model
        self._recorder = recorder
        self._budget = budget
        rows, width = MOST_ROWS, model.logits.shape[-1]
        while rows > 1 and rows * width * model.logits.itemsize > budget // _LOGITS_SHARE:
            rows //= 2
        self.rule = ShapeRule(rows, model.kv.num_blocks, model.kv.block_tokens)
        self._inputs = StaticInputs(self.rule, model.kv)
        self._logits = torch.empty(
            rows, width, dtype=model.logits.dtype, device=model.logits.device
        )
        # Outputs [1, most_rows, hidden] of the layers that some drafter asked for.
        self._states: dict[int, Tensor] = {}
        self._recordings: OrderedDict[_Key, Callable[[], None]] = OrderedDict()
        self._stopped = self._full = False

    @property
    def recordings(self) -> int:
        return len(self._recordings)

    @property
    def nbytes(self) -> int:
        """Of the device's memory, for static tensors and for what passes take in between."""
        held = [self._logits, *self._states.values()]
        return self._inputs.nbytes + sum(part.nbytes for part in held) + self._recorder.nbytes

    def run(self, spans: Sequence[Span], keep: Tensor) -> Tensor | None:
        """As `PackedModel.forward`; None for a pass that has to run without a recording."""
        shape = None if self._stopped else self.rule.find(spans)
        if shape is None:
            return None
        self._inputs.fill(shape, spans, keep)
        if not self._replay(shape):
            return None
        self._model.features.take(self._states)
        # The next pass writes to the same place.
        return self._logits[: len(keep)].clone()

    def warm_up(self) -> None:
        """Record what is likely to be used, the largest first: its memory serves the others.

        Touches no block that is handed out.
        """
        started = time.perf_counter()
        nothing = torch.zeros(0, dtype=torch.int64, device=self._logits.device)
        for shape in self.rule.first():
            if self._stopped or self._full or time.perf_counter() - started > _START_S:
                break
            self._inputs.fill(shape, [], nothing)
            if not self._recordings:
                try:
                    self._recorder.rehearse(self._pass(_Key(shape, ())))
                except Exception as error:
                    self.stop(_reason(error))
                    return
            self._replay(shape)
        if self._recordings:
            log.info(
                "CUDA graphs: passes of up to %d rows, %d shapes recorded in %.1f s, %.0f MiB",
                self.rule.most_rows,
                len(self._recordings),
                time.perf_counter() - started,
                self.nbytes / 2**20,
            )

    def stop(self, reason: str) -> None:
        """Let everything go; passes run without recordings from now on."""
        log.warning("passes run without CUDA graphs: %s", reason)
        self._stopped = True
        self._recordings.clear()
        self._states.clear()
        self._logits = self._logits[:0].clone()

    def _replay(self, shape: PassShape) -> bool:
        """Run a pass over the inputs; False if it is not recorded and cannot be."""
        features = self._model.features
        # One set for all steps that want any: most have the same drafter.
        key = _Key(shape, tuple(sorted(features.hooked_layer_ids)) if features.wanted else ())
        replay = self._recordings.get(key)
        if replay is None:
            replay = self._record(key)
            if replay is None:
                return False
        self._recordings.move_to_end(key)
        replay()
        return True

    def _record(self, key: _Key) -> Callable[[], None] | None:
        if self._full:
            return None
        # Before, so that its memory can be used again.
        while len(self._recordings) >= MOST_RECORDINGS:
            self._recordings.popitem(last=False)
        try:
            for layer_id in key.layer_ids:
                self._make_room(layer_id)
            replay = self._recorder.record(self._pass(key))
        except Exception as error:
            self.stop(_reason(error))
            return None
        self._recordings[key] = replay
        if self.nbytes > self._budget:
            self._full = True
            log.warning(
                "no more shapes are recorded: CUDA graphs take %.0f MiB, %.0f MiB are planned",
                self.nbytes / 2**20,
                self._budget / 2**20,
            )
        return replay

    def _make_room(self, layer_id: int) -> None:
        if layer_id not in self._states:
            like = self._model.kv.keys[0]
            self._states[layer_id] = like.new_empty(1, self.rule.most_rows, self._model.hidden_size)

    def _pass(self, key: _Key) -> Callable[[], None]:
        """What is recorded: from the inputs to the outputs, all of it on the device."""
        model, shape = self._model, key.shape
        inputs = self._inputs.views(shape)

        def run() -> None:
            attention = _StaticAttention(model, shape, inputs)
            with model.features.recording(key.layer_ids):
                ids, positions = inputs.ids.long(), inputs.positions.long()
                logits = model.run(
                    ids.unsqueeze(0), positions.unsqueeze(0), inputs.keep.long(), attention
                )
                self._logits[: shape.rows].copy_(logits)
                for layer_id, state in zip(key.layer_ids, model.features.states(), strict=True):
                    self._states[layer_id][:, : shape.rows].copy_(state)

        return run


@dataclass(frozen=True, slots=True)
class _Key:
    """A recording's shape, and the layers whose outputs it keeps, in order."""

    shape: PassShape
    layer_ids: tuple[int, ...]


class _StaticAttention:
    """An `AttentionPass` by the static inputs alone."""

    def __init__(self, model: Recordable, shape: PassShape, inputs: PassInputs) -> None:
        self._model = model
        self._shape = shape
        self._inputs = inputs
        self._slots = inputs.slots.long()

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, extras: Extras, mask: Any
    ) -> Tensor:
        model = self._model
        index = model.layers.index[id(layer)]
        rule = model.layers.rules[index]
        if not can_plan(rule, extras):
            what = "chunks" if rule.chunk is not None else "sinks"
            raise CannotRecord(f"layer {index} attends with {what}, which flash-attn does not")
        model.kv.put(index, self._slots, key[0], value[0])
        planned = self._plan(rule)
        return attend_varlen(model.varlen, planned, query[0], model.kv, index, extras).unsqueeze(0)

    def _plan(self, rule: Visibility) -> VarlenPlan:
        shape, inputs = self._shape, self._inputs
        return VarlenPlan(
            inputs.row_starts,
            inputs.key_starts,
            shape.longest_rows,
            shape.blocks * self._model.kv.block_tokens,
            inputs.block_table,
            (-1 if rule.window is None else rule.window - 1, 0),
        )


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
