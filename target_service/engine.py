"""The target model as a step over a list of work items.

All items of a step, of whatever sessions, are one packed row of tokens and one forward pass of the
stock Transformers model. Nothing here knows of gRPC.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from flashduet.errors import CheckpointError
from flashduet.kv.storage import KVStorage
from flashduet.sampling.choose import RowBlock, choose_blocks
from flashduet.sampling.params import Sampling
from target_service.answers import Answer, choose, tell_logprobs
from target_service.batching import Span
from target_service.compiled.checks import LARGEST_DIFFERENCE, check_logits, relative_difference
from target_service.compiled.model import CompiledModel
from target_service.features import FeatureCapture
from target_service.flash_varlen import HOW_TO_HAVE_IT, varlen_function
from target_service.forward import PackedModel
from target_service.graphs import GraphedPasses, Recordable
from target_service.invariance_trial import make_invariant
from target_service.layout import Part, lay_out, rows_to_keep
from target_service.load import LoadedTarget
from target_service.recorder import CudaRecorder, Recorder
from target_service.session import (
    ContextRows,
    Interval,
    PrefillChunk,
    StepFailure,
    StepResult,
    WorkItem,
)
from target_service.settings import NumericsChoice

log = logging.getLogger(__name__)


class Engine:
    """Runs one target over blocks of keys and values. Belongs to one thread.

    Whoever schedules steps owns the blocks: an item's session has room reserved in its table for
    all positions of the item, and one item a step at most.

    Args:
        target: taken over; its model is changed to run packed rows fast.
        num_blocks, block_tokens: of the store of keys and values, allocated here.
        numerics: with `batch_invariant`, `warm_up` makes results independent of the batch.
        graph_bytes: what recorded passes may take on a GPU; 0 for none.

    Raises:
        CheckpointError: the model cannot be served; names its type and the reason.
    """

    def __init__(
        self,
        target: LoadedTarget,
        num_blocks: int,
        block_tokens: int,
        numerics: NumericsChoice = "fast",
        graph_bytes: int = 0,
    ) -> None:
        self._numerics = numerics
        self._config = target.config
        self._dtype = target.dtype
        self._device = target.device
        self.packed = PackedModel(target)
        self.kv = KVStorage(
            self.packed.layers.shapes, num_blocks, block_tokens, target.dtype, target.device
        )
        self.packed.varlen = varlen_function(target.device, block_tokens, target.dtype)
        if target.device.type == "cuda":
            log.info(
                "attention: %s",
                "flash-attn varlen over the block table"
                if self.packed.varlen is not None
                else f"SDPA; for flash-attn {HOW_TO_HAVE_IT}",
            )
        self.features = FeatureCapture(target.decoder, target.config.num_hidden_layers)
        self._offered: CompiledModel | None = None
        self._graph_bytes = graph_bytes

    def offer(self, compiled: CompiledModel) -> None:
        """Go over to a compiled pass before the next step and let the model's weights go.

        May be called from any thread while the engine works; the time that it takes is the
        caller's.

        Raises:
            ConfigurationError: it does not compute what the model does.
        """
        ids = self.packed.probe_ids
        check_logits(compiled.probe(ids, self._dtype), self.packed.plain_logits)
        self._offered = compiled

    @property
    def compiled(self) -> bool:
        """Whether steps are, or from the next one on will be, compiled."""
        return self._offered is not None or self.packed.compiled is not None

    @torch.inference_mode()
    def step(self, items: Sequence[WorkItem]) -> list[StepResult | StepFailure]:
        """Compute all items, one result each, in order.

        A failing item leaves its session as it was and does not touch the others.
        """
        if self._offered is not None:
            self.packed.go_over(self._offered, self.features.take)
            self.features.let_go()
            self._offered = None
        if not items:
            return []
        try:
            return self._step(items)
        except Exception as error:
            if len(items) == 1:
                return [StepFailure(error)]
            # Only the culprit shall fail: nothing is committed yet, so each can go on its own.
            return [self.step([item])[0] for item in items]

    def _step(self, items: Sequence[WorkItem]) -> list[StepResult | StepFailure]:
        parts = lay_out(items)
        layer_ids = {layer_id for item in items for layer_id in item.layer_ids}
        with self.features.recording(layer_ids):
            started, clock = time.time_ns(), time.perf_counter_ns()
            keep = rows_to_keep(parts, self._device)
            logits = self.packed.forward(self.kv, [part.span for part in parts], keep)
            forward = Interval(started, time.perf_counter_ns() - clock)
            started, clock = time.time_ns(), time.perf_counter_ns()
            answers = choose(logits, parts)
            logprobs = tell_logprobs(logits, parts, answers)
            sample = Interval(started, time.perf_counter_ns() - clock)
            results: list[StepResult | StepFailure] = []
            for part, answer, told in zip(parts, answers, logprobs, strict=True):
                if isinstance(answer, StepFailure):
                    self._forget(part.span)
                    results.append(answer)
                    continue
                context = self._context(part, answer)
                _commit(part, answer)
                results.append(
                    StepResult(
                        answer.committed,
                        answer.accepted,
                        part.rows,
                        context,
                        forward,
                        sample,
                        told,
                    )
                )
            return results

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a throwaway sequence, so that the first request finds kernels chosen and memory
        mapped, and compare its logits with those of the model as it was loaded.

        Uses the first blocks of the store, so it must run before any session does.

        Raises:
            CheckpointError: packed passes over the store differ from a plain pass.
            ConfigurationError: batch-invariant numerics cannot be had.
        """
        if self._numerics == "batch_invariant":
            make_invariant(self.packed, self.kv, self._config.vocab_size)
        try:
            packed = self._probe(self.packed.probe_ids)
        except Exception as error:
            raise CheckpointError(
                f"model_type {self._config.model_type!r}: a packed pass failed: {error}"
            ) from error
        choose_blocks(packed, [RowBlock(1, len(packed), Sampling(temperature=1.0))])
        difference = relative_difference(packed, self.packed.plain_logits[: len(packed)])
        if not difference < LARGEST_DIFFERENCE[self._dtype]:
            raise CheckpointError(
                f"model_type {self._config.model_type!r}: logits of packed passes and of a plain "
                f"one differ by {difference:.0%}; the model does not use Transformers' attention "
                "interface as it is meant"
            )
        if self._graph_bytes and self._device.type == "cuda":
            self.record_passes(CudaRecorder(self._device), self._graph_bytes)

    @torch.inference_mode()
    def record_passes(self, recorder: Recorder, budget: int) -> None:
        """Run decoding passes from recordings, if those compute what the model does.

        Uses the first blocks of the store, so it must run before any session does.

        Args:
            budget: bytes of the device's memory for recordings and what they work on.
        """
        packed = self.packed
        if packed.varlen is None:
            return
        hidden_size = self._config.hidden_size
        model = Recordable(
            packed.call,
            packed.layers,
            self.kv,
            self.features,
            packed.varlen,
            hidden_size,
            packed.plain_logits,
        )
        packed.graphs = GraphedPasses(model, recorder, budget)
        packed.graphs.warm_up()
        # Once with other tokens, so that nothing but a repeated recording can give the right ones.
        self._probe(packed.probe_ids.roll(1))
        logits = self._probe(packed.probe_ids)
        difference = relative_difference(logits, packed.plain_logits[: len(logits)])
        if not difference < LARGEST_DIFFERENCE[self._dtype]:
            packed.graphs.stop(f"logits of recorded passes differ by {difference:.0%}")

    def _probe(self, ids: Tensor) -> Tensor:
        """Logits [n, V] of ids [1, n], a throwaway sequence: a chunk, a single row and a block."""
        tokens = ids[0].tolist()
        tokens = tokens[: self.kv.num_blocks * self.kv.block_tokens]
        blocks = range(self.kv.num_blocks)
        rows, start = [], 0
        for count in (16, 1, len(tokens)):
            part = tokens[start : start + count]
            if part:
                keep = torch.arange(len(part), device=self._device)
                rows.append(self.packed.forward(self.kv, [Span(blocks, start, part)], keep))
            start += count
        return torch.cat(rows)

    def _forget(self, span: Span) -> None:
        """Leave no bad numbers in blocks that another session may get: a masked position still
        takes part in a product, where nothing times NaN is NaN."""
        self.kv.clear(self.kv.locate(span.block_ids, span.base, span.end))

    def _context(self, part: Part, answer: Answer) -> ContextRows | None:
        """Features of the item's committed positions that its draft still needs."""
        item, span = part.item, part.span
        kept = part.rows if isinstance(item, PrefillChunk) else answer.accepted + 1
        skipped = max(0, item.session.draft_context_hit - item.base)
        if not item.layer_ids or skipped >= kept:
            return None
        first = part.first_row + skipped
        features = self.features.rows(item.layer_ids, first, kept - skipped)
        return ContextRows(item.base + skipped, tuple(span.token_ids[skipped:kept]), features)


def _commit(part: Part, answer: Answer) -> None:
    item, session = part.item, part.item.session
    computed = part.rows if isinstance(item, PrefillChunk) else answer.accepted + 1
    session.table.length = item.base + computed
    session.commit(answer.committed)
