"""Which keys a query of the block may see: one function for serving, training and evaluation.

A drafter trained under one mask and served under another loses its acceptance silently, so nobody
else builds a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerMask:
    """The mask of one decoder layer.

    Attributes:
        is_causal: queries see no later position, the block's own included.
        window: queries see positions nearer than this (on both sides if not causal); None: all.
    """

    is_causal: bool = False
    window: int | None = None

    @property
    def sees_everything(self) -> bool:
        return not self.is_causal and self.window is None


def visible(kind: LayerMask, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """The layer's rule by absolute position.

    Args:
        query_positions: int64 [..., q].
        key_positions: int64 [..., k].

    Returns:
        bool [..., q, k], True where the query sees the key.
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if kind.is_causal:
        seen &= distance >= 0
    if kind.window is not None:
        seen &= distance < kind.window
        if not kind.is_causal:
            seen &= -distance < kind.window
    return seen


def attention_mask(
    kind: LayerMask,
    positions: Tensor,
    context_positions: Tensor,
    anchors: Tensor | None = None,
) -> Tensor | None:
    """Mask of block queries over the keys [context ; block], in that order.

    Args:
        positions: int64 [..., q], absolute positions of the block rows.
        context_positions: int64 [..., c], absolute positions of the context rows. A row that is
            only padding gets a position at or past every anchor, which hides it.
        anchors: int64 [..., q], for each row the anchor position of the block that it belongs to,
            where several blocks of one sequence share a pass (training). A row then sees the
            context strictly before its anchor, and of the blocks only its own. None (serving):
            all rows are one block and all the context lies before its anchor.

    Returns:
        bool [..., q, c+q], or None where every query sees every key.
    """
    if anchors is None and kind.sees_everything:
        return None
    seen = visible(kind, positions, torch.cat([context_positions, positions], dim=-1))
    if anchors is not None:
        before_anchor = context_positions[..., None, :] < anchors[..., :, None]
        own_block = anchors[..., None, :] == anchors[..., :, None]
        seen &= torch.cat([before_anchor, own_block], dim=-1)
    return seen


def attention_masks(
    kinds: Iterable[LayerMask],
    positions: Tensor,
    context_positions: Tensor,
    anchors: Tensor | None = None,
) -> dict[LayerMask, Tensor | None]:
    """`attention_mask` of each different kind, so that layers of one kind share it."""
    return {
        kind: attention_mask(kind, positions, context_positions, anchors) for kind in set(kinds)
    }
