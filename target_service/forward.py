"""A stock Transformers model made to run packed rows of tokens over the block store."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashduet.errors import CheckpointError
from flashduet.kv.storage import KVStorage
from flashduet.packed_linear import can_pack, pack_linears
from target_service.attention import PACKED, AttentionPass, running
from target_service.batching import Span, split
from target_service.compiled.model import CompiledModel
from target_service.fast_norm import swap_norms
from target_service.flash_varlen import VarlenFunction
from target_service.graphs import GraphedPasses
from target_service.load import LoadedTarget
from target_service.numerics import Invariance
from target_service.packed import GatherRoom, PackedPass, Split
from target_service.survey import survey, vary

log = logging.getLogger(__name__)

_SURVEY_TOKENS = 24


class PackedModel:
    """Owns the model of a loaded target and changes it in place.

    Attributes:
        model: with packed attention; it can run no other passes any more. None once passes are
            compiled.
        compiled: what runs in its place.
        layers: its attention layers.
        invariance: how passes are laid out where a result's bits must not depend on the pass.
        varlen: flash-attn's function, where it can be used.
        graphs: passes that are recorded, where they are.
        plain_logits: [n, V] of the untouched model for `probe_ids` [1, n], to compare with.

    Raises:
        CheckpointError: the model cannot be served; names its type and the reason.
    """

    def __init__(self, target: LoadedTarget) -> None:
        self.model: Any = target.model
        self._device = target.device
        self._room = GatherRoom()
        self.compiled: CompiledModel | None = None
        self._take_states: Callable[[Sequence[Tensor]], None] | None = None
        self.invariance: Invariance | None = None
        self.varlen: VarlenFunction | None = None
        self.graphs: GraphedPasses | None = None
        accepted = inspect.signature(self.model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self.probe_ids = vary(_SURVEY_TOKENS, target.config.vocab_size).to(target.device)
        with torch.inference_mode():
            try:
                self.plain_logits: Tensor = self._run_plain()[0]
            except Exception as error:
                kind = target.config.model_type
                raise CheckpointError(f"model_type {kind!r}: a plain pass failed: {error}") from (
                    error
                )
            swap_norms(self.model)
            self.layers = survey(self.model, target.config, self._run_plain)
            if can_pack(target.dtype, target.device):
                report = pack_linears(self.model, self._run_surveyed(target.config))
                log.info(
                    "%d linear layers packed as %d products, %.0f MiB",
                    report.layers,
                    report.products,
                    report.nbytes / 2**20,
                )
        self.model.set_attn_implementation(PACKED)  # type: ignore[operator]

    def go_over(
        self, compiled: CompiledModel, take_states: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """Run compiled passes from now on, and let the model go.

        Args:
            take_states: given the outputs [1, n, hidden] of all layers after each pass.
        """
        self.compiled, self._take_states = compiled, take_states
        self.model = None

    def forward(self, kv: KVStorage, spans: Sequence[Span], keep: Tensor) -> Tensor:
        """Run the spans' tokens as one row; their keys and values are in `kv` afterwards.

        Args:
            keep: rows [k], int64, whose logits are wanted.

        Returns:
            logits [k, V].
        """
        if self.compiled is not None:
            logits, states = self.compiled.forward(kv, spans, keep)
            if self._take_states is not None:
                self._take_states(states)
            return logits
        recorded = None if self.graphs is None else self.graphs.run(spans, keep)
        logits = self._forward(kv, spans, keep) if recorded is None else recorded
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return logits

    def call(
        self, ids: Tensor, positions: Tensor, keep: Tensor, attention: AttentionPass
    ) -> Tensor:
        """The model over packed rows: ids and positions [1, n] to logits [k, V] of rows `keep`."""
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = keep
        with running(attention):
            logits: Tensor = self.model(**arguments).logits[0]
        return logits if self._takes_logits_to_keep else logits.index_select(0, keep)

    def _forward(self, kv: KVStorage, spans: Sequence[Span], keep: Tensor) -> Tensor:
        wanted = len(keep)
        chosen_split: Split = split
        if self.invariance is not None:
            spans, keep = self.invariance.pad(spans, kv), self.invariance.pad_rows(keep)
            chosen_split = self.invariance.split
        ids = [token_id for span in spans for token_id in span.token_ids]
        positions = [position for span in spans for position in range(span.base, span.end)]
        varlen = self.varlen if self.invariance is None else None
        attention = PackedPass(self.layers, kv, spans, self._room, chosen_split, varlen)
        device = self._device
        logits = self.call(
            torch.tensor([ids], device=device),
            torch.tensor([positions], device=device),
            keep,
            attention,
        )
        return logits[:wanted]

    def _run_plain(self) -> Tensor:
        return self.model(input_ids=self.probe_ids, use_cache=False).logits  # type: ignore[no-any-return]

    def _run_surveyed(self, config: Any) -> Any:
        return lambda: survey(self.model, config, self._run_plain)
