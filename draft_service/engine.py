"""Runs the drafter over a list of work. Knows tensors; knows no sessions, no queue and no gRPC.

All rows of a step, of whatever sessions, go through the linear layers as one packed row without
padding. Only attention is per session, over the session's own blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.choosing import Chooser
from draft_service.context import Context, ContextPlan, ContextStore, Seen, joined_slots
from draft_service.draft_vocabulary import DraftVocabulary
from draft_service.lookup import continued, look_up
from draft_service.masks import LayerMask, attention_masks
from draft_service.network import DFlashNetwork, folded_attention
from draft_service.work import Drafts, IngestWork, ProposeWork, StepResult, StepTimes
from flashduet.sampling.params import Sampling


class Engine:
    """The network, the target's two tensors, and one step over them.

    Not for two threads at once.

    Args:
        network: loaded, on its device and in its dtype; its weights are fused here.
        vocabulary: embedding and head, on the same device and in the same dtype.
        plan: room for contexts, taken here.
        lookup: tokens that must repeat for what followed them to be copied, see
            `draft_service.lookup`; 0: the drafter drafts always.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        vocabulary: DraftVocabulary,
        plan: ContextPlan | None = None,
        lookup: int = 0,
    ) -> None:
        self.network = network
        self.config = network.config
        self.device = network.norm.weight.device
        self.dtype = network.norm.weight.dtype
        self.plan = plan or ContextPlan()
        self.store = ContextStore(self.config, self.plan, self.dtype, self.device)
        self.vocab_size = vocabulary.vocab_size
        self._lookup = lookup
        self._embedding = vocabulary.embedding
        self._mask_embedding = vocabulary.mask_embedding
        self._head = vocabulary.product()
        self._chooser = Chooser(
            vocabulary.vocab_size, vocabulary.head_ids, network.candidate_selector
        )
        # Packed weights are not parameters, so sizes are taken before.
        own = sum(p.numel() * p.element_size() for p in network.parameters())
        self.weight_bytes = own + vocabulary.nbytes
        network.fuse()

    @torch.inference_mode()
    def step(self, ingests: Sequence[IngestWork], proposals: Sequence[ProposeWork]) -> StepResult:
        """Append what arrived, then draft: `take`, and `draft` for what was not copied."""
        taken = self.take(ingests, proposals)
        left = [w for w, drafts in zip(proposals, taken.drafts, strict=True) if drafts is None]
        if not left:
            return taken
        result = self.draft(left)
        drafted = iter(result.drafts)
        return StepResult(
            [next(drafted) if copy is None else copy for copy in taken.drafts],
            result.times.since(taken.times),
        )

    @torch.inference_mode()
    def take(self, ingests: Sequence[IngestWork], proposals: Sequence[ProposeWork]) -> StepResult:
        """Append what arrived, and copy from the text what can be, which takes no pass.

        Args:
            ingests: of any contexts; those of one context in the order of their positions.
            proposals: at most one of a context.

        Returns:
            None for proposals that are not copied.

        Raises:
            ValueError: an ingest does not begin where its context ends, or its blocks have no room.
                Nothing was changed.
        """
        start_ns = time.time_ns()
        if ingests:
            self._ingest(ingests)
        ingested_ns = time.time_ns()
        copies = [self._copied(work) if _ready(work) else None for work in proposals]
        return StepResult(copies, StepTimes(start_ns, ingested_ns, ingested_ns, time.time_ns()))

    @torch.inference_mode()
    def draft(self, proposals: Sequence[ProposeWork]) -> StepResult:
        """A pass of the drafter over a block for each; at most one of a context."""
        start_ns = forwarded_ns = time.time_ns()
        drafted: list[Drafts | None] = []
        ready = [work for work in proposals if _ready(work)]
        if ready:
            hidden, logits = self._forward(ready)
            self._synchronize()
            forwarded_ns = time.time_ns()
            drafted = self._chooser.choose(logits, hidden, ready)
        by_work = {
            id(work): self._continued(work, drafts)
            for work, drafts in zip(ready, drafted, strict=True)
        }
        return StepResult(
            [by_work.get(id(work)) for work in proposals],
            StepTimes(start_ns, start_ns, forwarded_ns, time.time_ns()),
        )

    def _copied(self, work: ProposeWork) -> Drafts | None:
        if not self._lookup or work.drafter_only:
            return None
        text, count = work.context.token_ids, work.block_length - 1
        copy = look_up(text, work.anchor_token_id, count, self._lookup)
        return copy if copy is not None and _wanted(copy, work) else None

    def _continued(self, work: ProposeWork, drafts: Drafts | None) -> Drafts | None:
        if drafts is None or not self._lookup or work.drafter_only:
            return drafts
        longer = continued(work.context.token_ids, work.anchor_token_id, drafts, self._lookup)
        return longer if _wanted(longer, work) else drafts

    def warm_up(self, block_length: int) -> None:
        """Run every path once, so that no request pays for first-time work.

        Before the first session: it uses blocks without asking for them.
        """
        context, block_ids = Context(), range(self.plan.num_blocks)
        rows = min(64, max(1, self.plan.rows // 2))
        features = torch.zeros((rows, self.config.feature_width), dtype=self.dtype).to(self.device)
        for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=1)):
            anchor = context.length + rows
            ingest = IngestWork(context, context.length, [0] * rows, features, block_ids)
            propose = ProposeWork(
                context, anchor, 0, block_length, sampling, 0, block_ids, drafter_only=True
            )
            self.step([ingest], [propose])

    def _ingest(self, ingests: Sequence[IngestWork]) -> None:
        ends: dict[int, int] = {}
        for work in ingests:
            end = ends.get(id(work.context), work.context.length)
            if work.base != end:
                raise ValueError(f"features of position {work.base} for a context of {end} rows")
            ends[id(work.context)] = end + work.rows
        slots = [self.store.slots(work.block_ids, work.base, work.end) for work in ingests]
        features = _joined([work.features.to(self.dtype) for work in ingests])
        positions = _joined([torch.arange(work.base, work.end) for work in ingests]).to(self.device)
        states = self.network.context_states(features)
        rows = self.network.context_rows(states, positions)
        self.store.write(joined_slots(slots, self.device), rows)
        for work in ingests:
            work.context.extend(work.token_ids)

    @torch.inference_mode()
    def draft_logits(self, proposals: Sequence[ProposeWork]) -> Tensor:
        """Float32 logits [sum of block_length - 1, k] of the draft slots, block after block.

        Every proposal's context has just the rows before its anchor, and is left as it was.
        """
        return self._forward(proposals)[1].float()

    def _forward(self, proposals: Sequence[ProposeWork]) -> tuple[Tensor, Tensor]:
        """Hidden states [n, H] and logits [n, k] of the draft slots, in whatever type they come."""
        config, network = self.config, self.network
        # Slot 0 is the anchor. It predicts nothing, unless slots predict what follows them.
        shift = 0 if config.sample_from_anchor else 1
        blocks, drafting, slots, token_ids, start = [], [], [], [], 0
        for work in proposals:
            rows = work.block_length - 1 + shift
            block = _Block.of(work, start, rows, config.layer_masks, self.store)
            blocks.append(block)
            token_ids += [work.anchor_token_id] + [config.mask_token_id] * (rows - 1)
            drafting.append(torch.arange(start + shift, start + rows))
            slots.append(torch.arange(rows))
            start += rows
        inputs = network.embed(torch.tensor(token_ids, device=self.device), self._embedding)
        place = _joined(slots).to(self.device)
        if self._mask_embedding is not None:
            masked = (self._mask_embedding * config.input_embedding_scale).to(inputs.dtype)
            inputs = torch.where((place > 0)[:, None], masked, inputs)
        positions = _joined([block.positions for block in blocks])

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kind = config.layer_masks[index]
            return _joined([block.attend(index, kind, q, k, v) for block in blocks])

        hidden = network.run(inputs, positions, attend, None if len(blocks) == 1 else place)
        hidden = hidden.index_select(0, _joined(drafting).to(self.device))
        return hidden, network.scaled(self._head(hidden))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


@dataclass(frozen=True, slots=True)
class _Block:
    """One proposal's rows in the packed row, and what each kind of layer lets them see."""

    store: ContextStore
    rows: slice
    positions: Tensor
    seen: dict[LayerMask, Seen]
    masks: dict[LayerMask, Tensor | None]

    @classmethod
    def of(
        cls,
        work: ProposeWork,
        start: int,
        length: int,
        kinds: Sequence[LayerMask],
        store: ContextStore,
    ) -> _Block:
        anchor = work.anchor_position
        device = store.storage.device
        positions = torch.arange(anchor, anchor + length, device=device)
        seen: dict[LayerMask, Seen] = {}
        masks: dict[LayerMask, Tensor | None] = {}
        for kind in set(kinds):
            # No query sees further back than the anchor does, so a window need not be masked there.
            first = 0 if kind.window is None else max(0, anchor - kind.window + 1)
            seen[kind] = store.seen(work.block_ids, first, anchor, length)
            if not kind.sees_everything:
                context_positions = torch.arange(first, anchor, device=device)
                masks |= attention_masks([kind], positions[None], context_positions[None])
        return cls(store, slice(start, start + length), positions, seen, masks)

    def attend(self, index: int, kind: LayerMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Packed q [n, heads, d], k and v [n, kv_heads, d] → this block's [rows, heads * d]."""
        rows, mask = self.rows, self.masks.get(kind)
        seen = self.store.with_block(index, self.seen[kind], k[rows], v[rows])
        return folded_attention(q[None, rows], seen.keys[None], seen.values[None], mask)[0]


def _ready(work: ProposeWork) -> bool:
    return work.context.length == work.anchor_position


def _wanted(drafts: Drafts, work: ProposeWork) -> bool:
    """Copies know nothing of a bias against a token; the drafter's choice does."""
    own, bias = len(drafts.token_ids) - drafts.copied, work.sampling.logit_bias
    return not (bias and any(bias.get(token, 0.0) < 0 for token in drafts.token_ids[own:]))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
