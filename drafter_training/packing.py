"""One pass of the drafter over many blocks of a batch.

Block by block on CPUs, by FlexAttention on CUDA devices, under a dense mask on others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draft_service.masks import LayerMask, attention_masks
from draft_service.network import DFlashNetwork, KeysValues
from drafter_training.block_attention import attend_in_blocks
from drafter_training.blocks import Blocks
from drafter_training.dataset import Batch
from drafter_training.variants import FusedInputNetwork


def denoise(
    network: DFlashNetwork, batch: Batch, embedding: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    """One packed pass over the blocks of each sequence, on the embedding's device.

    A block sees the context strictly before its anchor, and itself; the mask is the draft
    service's, so that training and serving cannot differ.

    Args:
        embedding: the target's, [V, H].

    Returns:
        [N, A, B, H], after the drafter's final norm.
    """
    if isinstance(network, FusedInputNetwork):
        return network.denoise(batch, embedding, blocks)
    device = embedding.device
    # Rows at or past every anchor are never seen.
    features = batch.features[:, : int(blocks.anchors.max())].to(device, embedding.dtype)
    positions = blocks.positions.flatten(1).to(device)
    places = torch.arange(features.shape[1], device=device).expand(len(features), -1)
    anchors = blocks.anchors.repeat_interleave(blocks.positions.shape[-1], 1).to(device)
    block = network.embed(blocks.tokens.flatten(1).to(device), embedding)
    context = network.context_kv(network.context_states(features), places)
    if device.type == "cuda":
        hidden = run_sparse(network, block, positions, context, anchors)
    else:
        masks = attention_masks(network.config.layer_masks, positions, places, anchors)
        if device.type == "cpu":
            slots = blocks.positions.shape[-1]
            hidden = run_by_block(network, block, positions, context, masks, slots)
        else:
            hidden = network(block, positions, context, masks)
    return hidden.view(*blocks.positions.shape, -1)


def run_by_block(
    network: DFlashNetwork,
    block: torch.Tensor,
    positions: torch.Tensor,
    context: list[KeysValues],
    masks: dict[LayerMask, torch.Tensor | None],
    slots: int,
) -> torch.Tensor:
    """The same pass on a CPU, in which no block's rows are multiplied with another's keys.

    Args:
        block: [N, Q, H]. positions: int64 [N, Q]. context: of each layer.
        masks: bool [N, Q, c+Q] of each kind of layer. slots: rows of a block.
    """
    context_rows = context[0].keys.shape[2]
    seen = {kind: of_own_block(mask, context_rows, slots) for kind, mask in masks.items()}

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layer = context[index]
        mask = seen[network.config.layer_masks[index]]
        return attend_in_blocks(q, layer.keys, layer.values, k, v, mask)

    return network.run(block, positions, attend)


def of_own_block(mask: torch.Tensor | None, context_rows: int, slots: int) -> torch.Tensor:
    """Of a mask [N, Q, c+Q] the context's columns and those of each row's block: [N, A, B, c+B]."""
    assert mask is not None  # many blocks share the pass
    rows = mask.unflatten(1, (-1, slots))
    own = rows[..., context_rows:].unflatten(-1, (-1, slots))  # [N, A, B, A, B]
    return torch.cat([rows[..., :context_rows], own.diagonal(dim1=1, dim2=3).movedim(-1, 1)], -1)


def run_sparse(
    network: DFlashNetwork,
    block: torch.Tensor,
    positions: torch.Tensor,
    context: list[KeysValues],
    anchors: torch.Tensor,
    attention: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """The same pass by FlexAttention, which skips the tiles that nobody sees.

    Args:
        block: [N, Q, H]. positions, anchors: int64 [N, Q]. context: of each layer, at positions
            0, 1, ... of the sequence.
        attention: `flex_attention`, compiled or not; None compiles it once.
    """
    attend_by = attention or _compiled()
    masks = {
        kind: sparse_mask(kind, positions, context[0].keys.shape[2], anchors)
        for kind in set(network.config.layer_masks)
    }

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([context[index].keys, k.transpose(1, 2)], dim=2)
        values = torch.cat([context[index].values, v.transpose(1, 2)], dim=2)
        out = attend_by(
            q.transpose(1, 2),
            keys,
            values,
            block_mask=masks[network.config.layer_masks[index]],
            enable_gqa=q.shape[2] != keys.shape[1],
        )
        return out.transpose(1, 2).flatten(2)

    return network.run(block, positions, attend)


def sparse_mask(
    kind: LayerMask, positions: torch.Tensor, context: int, anchors: torch.Tensor
) -> BlockMask:
    """`draft_service.masks.attention_mask`, one query and one key at a time (a test compares)."""

    def seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        own = key - context
        place = torch.where(own < 0, key, positions[row, own.clamp_min(0)])
        anchor = anchors[row, query]
        mine = torch.where(own < 0, key < anchor, anchors[row, own.clamp_min(0)] == anchor)
        distance = positions[row, query] - place
        if kind.is_causal:
            mine = mine & (distance >= 0)
        if kind.window is not None:
            mine = mine & (distance < kind.window)
            if not kind.is_causal:
                mine = mine & (-distance < kind.window)
        return mine

    rows, queries = positions.shape
    return create_block_mask(
        seen, rows, None, queries, context + queries, device=str(positions.device)
    )


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
