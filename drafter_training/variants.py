"""Networks of the ablations that are no DFlash drafters."""

from __future__ import annotations

import torch

from draft_service.masks import attention_masks
from draft_service.network import DFlashNetwork
from drafter_training.blocks import Blocks
from drafter_training.dataset import Batch


class FusedInputNetwork(DFlashNetwork):
    """Input fusion: the target's features enter once, added to the input, not to keys and values.

    Context rows are the embeddings of the tokens plus the projected feature of the position before
    them, and run through the layers causally; the block's rows get the feature of the last position
    before the anchor. So the layers make context keys and values of their own states.
    """

    def denoise(self, batch: Batch, embedding: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Like `packing.denoise`, on the CPU: [N, A, B, H]."""
        features = batch.features[:, : int(blocks.anchors.max())].to(embedding.dtype)
        context = features.shape[1]  # an anchor that is only padding may lie past the sequence
        states = self.context_states(features)
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        places = torch.arange(context).expand(len(states), -1)
        rows = self.embed(batch.tokens[:, :context], embedding) + before
        last = (blocks.anchors - 1).clamp(0, context - 1)
        given = states.gather(1, last[..., None].expand(-1, -1, states.shape[-1]))
        width = blocks.positions.shape[-1]
        block = self.embed(blocks.tokens.flatten(1), embedding)
        block = block + given.repeat_interleave(width, 1)
        positions = blocks.positions.flatten(1)
        anchors = blocks.anchors.repeat_interleave(width, 1)
        kind = self.config.layer_masks[0]
        mask = attention_masks([kind], positions, places, anchors)[kind]
        assert mask is not None
        causal = places[..., None, :] <= places[..., :, None]
        nothing = torch.zeros(len(states), context, positions.shape[1], dtype=torch.bool)
        whole = torch.cat([torch.cat([causal, nothing], -1), mask], 1)
        hidden = self.run(
            torch.cat([rows, block], 1),
            torch.cat([places, positions], 1),
            lambda _, q, k, v: _attend(q, k, v, whole),
        )
        return hidden[:, context:].view(*blocks.positions.shape, -1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N, rows, heads, d] each -> [N, rows, heads * d]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask[:, None],
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).flatten(2)
