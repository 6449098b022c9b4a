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
from torch.nn import functional

from draft_service.context import Context, ContextPlan, ContextStore, Seen, joined_slots
from draft_service.joined_linear import Product
from draft_service.masks import LayerMask, attention_masks
from draft_service.network import DFlashNetwork, folded_attention
from draft_service.target_tensors import TargetTensors
from draft_service.work import Drafts, IngestWork, ProposeWork, StepResult, StepTimes
from flashduet.packed_linear import PackedLinear, can_pack
from flashduet.sampling.choose import BadLogits, RowBlock, choose_draft_blocks
from flashduet.sampling.params import Sampling


class Engine:
    """The network, the target's two tensors, and one step over them.

    Not for two threads at once.

    Args:
        network: loaded, on its device and in its dtype; its weights are fused here.
        tensors: the target's embedding and head, on the same device and in the same dtype.
        plan: room for contexts, taken here.
    """

    def __init__(
        self, network: DFlashNetwork, tensors: TargetTensors, plan: ContextPlan | None = None
    ) -> None:
        self.network = network
        self.config = network.config
        self.device = network.norm.weight.device
        self.dtype = network.norm.weight.dtype
        self.plan = plan or ContextPlan()
        self.store = ContextStore(self.config, self.plan, self.dtype, self.device)
        self._embedding = tensors.embedding
        self._head: Product = _head(tensors)
        # Packed weights are not parameters, so sizes are taken before.
        self.weight_bytes = _weight_bytes(network, tensors)
        network.fuse()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this: the rows of the target's embedding."""
        return self._embedding.shape[0]

    @torch.inference_mode()
    def step(self, ingests: Sequence[IngestWork], proposals: Sequence[ProposeWork]) -> StepResult:
        """Append what arrived, then draft.

        Args:
            ingests: of any contexts; those of one context in the order of their positions.
            proposals: at most one of a context.

        Raises:
            ValueError: an ingest does not begin where its context ends, or its blocks have no room.
                Nothing was changed.
        """
        start_ns = time.time_ns()
        if ingests:
            self._ingest(ingests)
        ingested_ns = time.time_ns()
        ready = [work for work in proposals if work.context.length == work.anchor_position]
        forwarded_ns = sampled_ns = ingested_ns
        drafted: list[Drafts | None] = []
        if ready:
            logits = self._logits(ready)
            self._synchronize()
            forwarded_ns = time.time_ns()
            drafted = self._choose(logits, ready)
            sampled_ns = time.time_ns()
        by_work = dict(zip(map(id, ready), drafted, strict=True))
        return StepResult(
            [by_work.get(id(work)) for work in proposals],
            StepTimes(start_ns, ingested_ns, forwarded_ns, sampled_ns),
        )

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
            propose = ProposeWork(context, anchor, 0, block_length, sampling, 0, block_ids)
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
        """Float32 logits [sum of block_length - 1, V] of the draft slots, block after block.

        Every proposal's context has just the rows before its anchor, and is left as it was.
        """
        return self._logits(proposals).float()

    def _logits(self, proposals: Sequence[ProposeWork]) -> Tensor:
        """As `draft_logits`, in whatever type they come."""
        blocks, slots, token_ids, start = [], [], [], 0
        for work in proposals:
            blocks.append(_Block.of(work, start, self.config.layer_masks, self.store))
            token_ids += [work.anchor_token_id] + [self.config.mask_token_id] * (
                work.block_length - 1
            )
            # Slot 0 is the anchor and predicts nothing.
            slots.append(torch.arange(start + 1, start + work.block_length))
            start += work.block_length
        network = self.network
        inputs = network.embed(torch.tensor(token_ids, device=self.device), self._embedding)
        positions = _joined([block.positions for block in blocks])

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kind = self.config.layer_masks[index]
            return _joined([block.attend(index, kind, q, k, v) for block in blocks])

        hidden = network.run(inputs, positions, attend)
        hidden = hidden.index_select(0, _joined(slots).to(self.device))
        return network.scaled(self._head(hidden))

    def _choose(self, logits: Tensor, proposals: Sequence[ProposeWork]) -> list[Drafts | None]:
        try:
            return list(_choose_blocks(logits, proposals))
        except BadLogits:
            # One session's broken features must not cost the others their drafts.
            rows = [work.block_length - 1 for work in proposals]
            return [
                _choose_alone(block, work)
                for block, work in zip(logits.split(rows), proposals, strict=True)
            ]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _head(tensors: TargetTensors) -> Product:
    """The target's head as a product [n, H] → [n, V]."""
    if can_pack(tensors.head.dtype, tensors.head.device):
        return PackedLinear([tensors.head], [tensors.head_bias])
    return lambda hidden: functional.linear(hidden, tensors.head, tensors.head_bias)


def _weight_bytes(network: DFlashNetwork, tensors: TargetTensors) -> int:
    """Memory of all weights once they serve; a packed head is a copy of its own."""
    own = sum(p.numel() * p.element_size() for p in network.parameters())
    shared = tensors.head is tensors.embedding and not can_pack(
        tensors.head.dtype, tensors.head.device
    )
    return own + tensors.embedding.nbytes + (0 if shared else tensors.head.nbytes)


def _choose_blocks(logits: Tensor, proposals: Sequence[ProposeWork]) -> list[Drafts]:
    """Logits of all blocks' draft slots → the drafts of each block, in one call."""
    blocks = [
        RowBlock(
            work.anchor_position + 1,
            work.block_length - 1,
            work.sampling,
            work.choice,
            work.context.history,
            pending=(work.anchor_token_id,),
        )
        for work in proposals
    ]
    return [
        Drafts(chosen.tokens, chosen.confidence) for chosen in choose_draft_blocks(logits, blocks)
    ]


def _choose_alone(logits: Tensor, work: ProposeWork) -> Drafts | None:
    try:
        return _choose_blocks(logits, [work])[0]
    except BadLogits:
        return None


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
        cls, work: ProposeWork, start: int, kinds: Sequence[LayerMask], store: ContextStore
    ) -> _Block:
        anchor, length = work.anchor_position, work.block_length
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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
