"""The DFlash network: a few pre-norm Qwen3 layers whose keys and values also come from the target.

Parameter names are those of z-lab checkpoints, so that `state_dict()` is a checkpoint. There is no
embedding and no head: both belong to the target. Everything here is differentiable; `fuse` (for
serving) joins weights so that a block needs fewer and larger multiplications.

Shapes: H hidden size, L layers, n tapped target layers, c context rows, q block rows, d head size.
Leading dimensions `...` are batch dimensions, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.config import DrafterConfig
from draft_service.joined_linear import Joined, Product, fused
from draft_service.layers import (
    Attend,
    KeysValues,
    Layer,
    Place,
    RMSNorm,
    Rotary,
    folded_attention,
    rotate,
)
from draft_service.masks import LayerMask
from draft_service.native_rows import RowKernels, kernels_for
from draft_service.selector import CandidateSelector
from flashduet.packed_linear import PackedLinear, can_pack

__all__ = ["Attend", "DFlashNetwork", "KeysValues", "folded_attention"]


class DFlashNetwork(nn.Module):
    """The drafter without embedding and head (arXiv 2602.06036, section 3)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc: nn.Module = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.candidate_selector = None
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, config.hidden_size, config.selector_rank, config.selector_top_k
            )
        self._fused_context: Product | None = None
        self._fused_key_norms: Tensor | None = None
        self._kernels: RowKernels | None = None
        # Where all layers' keys begin in a row of the context projection, and their norms' weights.
        self._key_offsets: Tensor | None = None
        self._key_weights: Tensor | None = None

    def embed(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        """Block input: int64 [..., q], the target's embedding [V, H] → [..., q, H]."""
        return functional.embedding(token_ids, embedding) * self.config.input_embedding_scale

    def context_states(self, features: Tensor) -> Tensor:
        """Features [..., c, n·H] → what every layer makes keys and values of, [..., c, H]."""
        return self.hidden_norm(self.fc(features))

    def context_kv_stacked(self, context: Tensor, positions: Tensor) -> KeysValues:
        """All layers' context keys and values from one projection.

        Args:
            context: [..., c, H] of `context_states`.
            positions: int64 [..., c], absolute.

        Returns:
            Keys (normed and rotated) and values, both [L, ..., kv_heads, c, d].
        """
        rows = self.context_rows(context, positions)
        return KeysValues(*(x.movedim(-3, 0).transpose(-2, -3) for x in rows))

    def context_rows(self, context: Tensor, positions: Tensor) -> KeysValues:
        """As `context_kv_stacked`, row by row: both [..., c, L, kv_heads, d]."""
        config = self.config
        norms = self._fused_key_norms
        if norms is None:
            norms = self._key_norms()
        shape = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        project = self._fused_context or Joined(self._context_parts())
        both = project(context)
        cos, sin = self.rotary(positions, context.dtype)  # [..., c, 1, d]
        if self._kernels is not None:
            assert self._key_offsets is not None
            assert self._key_weights is not None
            self._kernels.norm_and_rotate(
                both, self._key_offsets, self._key_weights, config.rms_norm_eps, cos, sin
            )
            return KeysValues(*both.unflatten(-1, shape).unbind(-3))
        keys, values = both.unflatten(-1, shape).unbind(-3)  # each [..., c, L, kv_heads, d]
        keys = functional.rms_norm(keys, (config.head_dim,), None, config.rms_norm_eps)
        keys = rotate(keys * norms[:, None, :], cos[..., None, :], sin[..., None, :])
        return KeysValues(keys, values)

    def context_kv(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """`context_kv_stacked` as a list, one entry a layer, each [..., kv_heads, c, d]."""
        stacked = self.context_kv_stacked(context, positions)
        return [KeysValues(k, v) for k, v in zip(stacked.keys, stacked.values, strict=True)]

    def run(
        self, block: Tensor, positions: Tensor, attend: Attend, slots: Tensor | None = None
    ) -> Tensor:
        """Block inputs [..., q, H] at int64 [..., q] → [..., q, H] after the final norm.

        Args:
            slots: int64 [..., q], each row's place in its block, where several blocks follow one
                another along q; None: the rows are one block.
        """
        cos, sin = self.rotary(positions, block.dtype)
        place = Place(cos, sin, slots)
        for index, layer in enumerate(self.layers):
            block = layer(block, index, place, attend)
        return self.norm(block)

    def forward(
        self,
        block_embeds: Tensor,
        positions: Tensor,
        context: Sequence[KeysValues],
        masks: Mapping[LayerMask, Tensor | None],
    ) -> Tensor:
        """One pass over block rows.

        Args:
            block_embeds: [b, q, H] of `embed`.
            positions: int64 [b, q], absolute.
            context: of each layer, keys and values [b, kv_heads, c, d] from `context_kv`.
            masks: of each kind of layer, bool [b, q, c+q] or None, from `attention_masks`.

        Returns:
            [b, q, H], after the final norm.
        """

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = torch.cat([context[index].keys, k.transpose(1, 2)], dim=2)
            values = torch.cat([context[index].values, v.transpose(1, 2)], dim=2)
            return folded_attention(q, keys, values, masks[self.config.layer_masks[index]])

        return self.run(block_embeds, positions, attend)

    def logits(self, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., H], the target's head [V, H] and perhaps its bias [V] → float32 [..., V]."""
        return self.scaled(functional.linear(hidden, head, bias)).float()

    def scaled(self, logits: Tensor) -> Tensor:
        """What the head gives, [..., V], with the drafter's factor and cap (then in float32)."""
        multiplier, cap = self.config.output_multiplier, self.config.final_logit_softcapping
        if multiplier != 1.0:
            logits = logits.float() * multiplier
        if cap is not None:
            logits = torch.tanh(logits.float() / cap) * cap
        return logits

    def skip_identities(self) -> None:
        """Leaves out, from now on, convolutions that change nothing; they are not trained."""
        for layer in self._decoder_layers():
            for conv in layer.convolutions:
                conv.skip_if_identity()

    def fuse(self, pack: bool | None = None) -> None:
        """Join weights for serving, and pack them; by default where the processor has kernels.

        The context projection needs another grouping than the block's, so keys' and values' weights
        are held twice. The separate parameters are gone where packed, and views where not. Not for
        training.
        """
        self.requires_grad_(False)
        self.skip_identities()
        able = can_pack(self.norm.weight.dtype, self.norm.weight.device)
        packed = able if pack is None else pack
        self._fused_context = fused(self._context_parts(), packed, shared=True)
        self._fused_key_norms = self._key_norms()
        for layer in self._decoder_layers():
            layer.fuse(packed)
        if packed:
            self.fc = PackedLinear.of(self.fc)
        self._kernels = kernels_for(self.norm.weight)
        for module in self.modules():
            if isinstance(module, RMSNorm | Rotary):
                module.kernels = self._kernels
        heads, size = self.config.num_kv_heads, self.config.head_dim
        each = torch.arange(self.config.num_layers)[:, None] * 2 * heads + torch.arange(heads)
        self._key_offsets = each.flatten() * size
        self._key_weights = self._fused_key_norms.repeat_interleave(heads, dim=0)

    def _decoder_layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def _context_parts(self) -> list[nn.Linear]:
        return [
            part
            for layer in self._decoder_layers()
            for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        ]

    def _key_norms(self) -> Tensor:
        return torch.stack([layer.self_attn.k_norm.weight for layer in self._decoder_layers()])
