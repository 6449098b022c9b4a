"""The target model as a step over a list of work items.

All items of a step, of whatever sessions, are one packed row of tokens and one forward pass of the
stock Transformers model. Nothing here knows of gRPC.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashduet.errors import CheckpointError
from flashduet.kv.storage import KVStorage
from flashduet.sampling.choose import BadLogits, RowBlock, choose_blocks
from flashduet.sampling.logprobs import row_logprobs
from flashduet.sampling.params import Sampling
from flashduet.sampling.position_logprobs import PositionLogprobs
from target_service.batching import Span
from target_service.features import FeatureCapture
from target_service.forward import PackedModel
from target_service.invariance_trial import make_invariant
from target_service.load import LoadedTarget
from target_service.session import (
    ContextRows,
    Interval,
    PrefillChunk,
    StepFailure,
    StepResult,
    WorkItem,
)
from target_service.settings import NumericsChoice

# Of packed logits from plain ones, by the element type's rounding; a wrong mask is far above.
_LARGEST_DIFFERENCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}


@dataclass(frozen=True, slots=True)
class _Part:
    """One item's place in a step.

    Attributes:
        first_row: of its tokens in the packed row.
        first_kept: of its rows among those whose logits are computed.
        kept: how many of its rows, its last ones, have logits.
        chooses: whether tokens are chosen from them; those of an inner chunk are only looked at.
    """

    item: WorkItem
    span: Span
    first_row: int
    first_kept: int
    kept: int
    chooses: bool

    @property
    def rows(self) -> int:
        return len(self.span.token_ids)

    @property
    def logit_rows(self) -> range:
        return range(self.first_kept, self.first_kept + self.kept)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The tokens that an item commits: accepted drafts and the bonus, or a prefill's first."""

    committed: tuple[int, ...]
    accepted: int


class Engine:
    """Runs one target over blocks of keys and values. Belongs to one thread.

    Whoever schedules steps owns the blocks: an item's session has room reserved in its table for
    all positions of the item, and one item a step at most.

    Args:
        target: taken over; its model is changed to run packed rows fast.
        num_blocks, block_tokens: of the store of keys and values, allocated here.
        numerics: with `batch_invariant`, `warm_up` makes results independent of the batch.

    Raises:
        CheckpointError: the model cannot be served; names its type and the reason.
    """

    def __init__(
        self,
        target: LoadedTarget,
        num_blocks: int,
        block_tokens: int,
        numerics: NumericsChoice = "fast",
    ) -> None:
        self._numerics = numerics
        self._config = target.config
        self._dtype = target.dtype
        self._device = target.device
        self.packed = PackedModel(target)
        self.kv = KVStorage(
            self.packed.layers.shapes, num_blocks, block_tokens, target.dtype, target.device
        )
        self.features = FeatureCapture(target.decoder, target.config.num_hidden_layers)

    @torch.inference_mode()
    def step(self, items: Sequence[WorkItem]) -> list[StepResult | StepFailure]:
        """Compute all items, one result each, in order.

        A failing item leaves its session as it was and does not touch the others.
        """
        try:
            return self._step(items)
        except Exception as error:
            if len(items) == 1:
                return [StepFailure(error)]
            # Only the culprit shall fail: nothing is committed yet, so each can go on its own.
            return [self.step([item])[0] for item in items]

    def _step(self, items: Sequence[WorkItem]) -> list[StepResult | StepFailure]:
        parts = _lay_out(items)
        layer_ids = {layer_id for item in items for layer_id in item.layer_ids}
        with self.features.recording(layer_ids):
            started, clock = time.time_ns(), time.perf_counter_ns()
            keep = _rows_to_keep(parts, self._device)
            logits = self.packed.forward(self.kv, [part.span for part in parts], keep)
            forward = Interval(started, time.perf_counter_ns() - clock)
            started, clock = time.time_ns(), time.perf_counter_ns()
            answers = _choose(logits, parts)
            logprobs = _tell_logprobs(logits, parts, answers)
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
        plain = self.packed.plain_logits
        tokens = self.packed.probe_ids[0].tolist()
        tokens = tokens[: self.kv.num_blocks * self.kv.block_tokens]
        blocks = range(self.kv.num_blocks)
        rows, start = [], 0
        # A chunk, a single row and a block.
        for count in (16, 1, len(tokens)):
            part = tokens[start : start + count]
            if part:
                span = Span(blocks, start, part)
                keep = torch.arange(len(part), device=self._device)
                try:
                    rows.append(self.packed.forward(self.kv, [span], keep))
                except Exception as error:
                    raise CheckpointError(
                        f"model_type {self._config.model_type!r}: a packed pass failed: {error}"
                    ) from error
            start += count
        packed = torch.cat(rows)
        choose_blocks(packed, [RowBlock(1, len(packed), Sampling(temperature=1.0))])
        difference = _relative_difference(packed, plain[: len(tokens)])
        if not difference < _LARGEST_DIFFERENCE[self._dtype]:
            raise CheckpointError(
                f"model_type {self._config.model_type!r}: logits of packed passes and of a plain "
                f"one differ by {difference:.0%}; the model does not use Transformers' attention "
                "interface as it is meant"
            )

    def _forget(self, span: Span) -> None:
        """Leave no bad numbers in blocks that another session may get: a masked position still
        takes part in a product, where nothing times NaN is NaN."""
        self.kv.clear(self.kv.locate(span.block_ids, span.base, span.end))

    def _context(self, part: _Part, answer: _Answer) -> ContextRows | None:
        """Features of the item's committed positions that its draft still needs."""
        item, span = part.item, part.span
        kept = part.rows if isinstance(item, PrefillChunk) else answer.accepted + 1
        skipped = max(0, item.session.draft_context_hit - item.base)
        if not item.layer_ids or skipped >= kept:
            return None
        first = part.first_row + skipped
        features = self.features.rows(item.layer_ids, first, kept - skipped)
        return ContextRows(item.base + skipped, tuple(span.token_ids[skipped:kept]), features)


def _lay_out(items: Sequence[WorkItem]) -> list[_Part]:
    """Check the items and give each its rows.

    Raises:
        ValueError: a session's table does not end where its item begins.
    """
    parts: list[_Part] = []
    row = kept_row = 0
    for item in items:
        session = item.session
        if item.base != session.table.length:
            raise ValueError(
                f"the table holds {session.table.length} tokens, base {item.base} given"
            )
        if isinstance(item, PrefillChunk):
            # The last row tells whether all before it were sound: a bad number spreads to it.
            tokens, kept, chooses = item.token_ids, 1, item.last
        else:
            tokens = (session.token_ids[item.base], *item.token_ids)
            kept, chooses = len(tokens), True
        span = Span(session.table.block_ids, item.base, tokens)
        parts.append(_Part(item, span, row, kept_row, kept, chooses))
        row += len(tokens)
        kept_row += kept
    return parts


def _rows_to_keep(parts: Sequence[_Part], device: torch.device) -> Tensor:
    rows = [
        row
        for part in parts
        for row in range(part.first_row + part.rows - part.kept, part.first_row + part.rows)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _choose(logits: Tensor, parts: Sequence[_Part]) -> list[_Answer | StepFailure]:
    """Choose for all rows of the step in one call; items with bad logits fail alone."""
    failures = _unsound_chunks(logits, parts)
    while True:
        sound = [i for i, part in enumerate(parts) if part.chooses and i not in failures]
        rows = [row for i in sound for row in parts[i].logit_rows]
        chosen: list[list[int]] = []
        try:
            if rows:
                wanted = _take_rows(logits, rows)
                chosen = choose_blocks(wanted, [_row_block(parts[i]) for i in sound])
            break
        except BadLogits as error:
            bad = {rows[row] for row in error.rows}
            for i in sound:
                if not bad.isdisjoint(parts[i].logit_rows):
                    failures[i] = StepFailure(error)
    tokens = dict(zip(sound, chosen, strict=True))
    return [
        failures.get(i) or _accept(part.item, tokens.get(i, [])) for i, part in enumerate(parts)
    ]


def _unsound_chunks(logits: Tensor, parts: Sequence[_Part]) -> dict[int, StepFailure]:
    """Inner chunks whose last row is no distribution; none may be built on."""
    inner = [i for i, part in enumerate(parts) if not part.chooses]
    if not inner:
        return {}
    largest = _take_rows(logits, [parts[i].first_kept for i in inner]).amax(dim=-1)
    sound = torch.isfinite(largest).tolist()
    return {
        i: StepFailure(BadLogits((0,))) for i, good in zip(inner, sound, strict=True) if not good
    }


def _take_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _row_block(part: _Part) -> RowBlock:
    item, session = part.item, part.item.session
    drafts = () if isinstance(item, PrefillChunk) else item.token_ids
    first = part.span.end - part.kept + 1
    return RowBlock(
        first, part.kept, session.sampling, session.choice, session.history, drafts=drafts
    )


def _accept(item: WorkItem, chosen: list[int]) -> _Answer:
    if isinstance(item, PrefillChunk):
        return _Answer(tuple(chosen), 0)
    # Row i chose the token that follows row i's; drafts hold as far as both agree.
    drafts, accepted = item.token_ids, 0
    while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
        accepted += 1
    return _Answer(tuple(chosen[: accepted + 1]), accepted)


def _tell_logprobs(
    logits: Tensor, parts: Sequence[_Part], answers: Sequence[_Answer | StepFailure]
) -> list[tuple[PositionLogprobs, ...]]:
    """Logprobs of the committed tokens of each item whose session asks for them."""
    rows: list[int] = []
    token_ids: list[int] = []
    top: list[int] = []
    counts = []
    for part, answer in zip(parts, answers, strict=True):
        wanted = part.item.session.top_logprobs
        count = 0
        if wanted is not None and isinstance(answer, _Answer):
            count = len(answer.committed)
            rows += part.logit_rows[:count]
            token_ids += answer.committed
            top += [wanted] * count
        counts.append(count)
    told = iter(row_logprobs(logits, rows, token_ids, top) if rows else ())
    return [tuple(next(told) for _ in range(count)) for count in counts]


def _commit(part: _Part, answer: _Answer) -> None:
    item, session = part.item, part.item.session
    computed = part.rows if isinstance(item, PrefillChunk) else answer.accepted + 1
    session.table.length = item.base + computed
    session.commit(answer.committed)


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference, against that of the logits around their mean."""
    ours, theirs = ours.double(), theirs.double()
    spread = theirs - theirs.mean(dim=-1, keepdim=True)
    return float((ours - theirs).norm() / spread.norm())
