"""The DFlash network: a few pre-norm Qwen3 layers whose keys and values also come from the target.

Parameter names are those of z-lab checkpoints, so that `state_dict()` is a checkpoint. There is no
embedding and no head: both belong to the target. Everything here is differentiable; `fuse` (for
serving) joins weights so that a block needs fewer and larger multiplications.

Shapes: H hidden size, L layers, n tapped target layers, c context rows, q block rows, d head size.
Leading dimensions `...` are batch dimensions, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from draft_service.config import DrafterConfig
from draft_service.joined_linear import Joined, Product, fused
from draft_service.masks import LayerMask
from flashduet.packed_linear import PackedLinear, can_pack

# (layer index, q [..., q, heads, d], k [..., q, kv_heads, d], v like k) → [..., q, heads * d].
# Training and serving keep context keys in different places; this is the seam between them.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class KeysValues(NamedTuple):
    """Keys (normed and rotated) and values of one layer: both [..., kv_heads, c, d]."""

    keys: Tensor
    values: Tensor


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """cos and sin by absolute position. Computed, never looked up: no position is too large."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        # Not a buffer: .to(bfloat16) would round it.
        self.frequencies = torch.tensor(
            config.inverse_frequencies, dtype=torch.float32, device="cpu"
        )
        self.scale = config.rotary_scale

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int64 [..., n] → cos, sin [..., n, 1, d], to be applied to [..., n, heads, d]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout: x · cos + [-x₂ ; x₁] · sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Projections of one layer; where keys are kept is the caller's affair."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.sizes = [
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        ]
        self.q_proj = nn.Linear(hidden, self.sizes[0], bias=bias)
        self.k_proj = nn.Linear(hidden, self.sizes[1], bias=bias)
        self.v_proj = nn.Linear(hidden, self.sizes[2], bias=bias)
        self.o_proj: nn.Module = nn.Linear(self.sizes[0], hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.fused: Product | None = None

    def queries_keys_values(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """[..., q, H] → q [..., q, heads, d] and k, v [..., q, kv_heads, d]; q and k rotated."""
        if self.fused is None:
            q, k, v = self.q_proj(h), self.k_proj(h), self.v_proj(h)
        else:
            q, k, v = self.fused(h).split(self.sizes, dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim)))
        return rotate(q, cos, sin), rotate(k, cos, sin), v.unflatten(-1, (-1, self.head_dim))

    def fuse(self, packed: bool) -> None:
        self.fused = fused([self.q_proj, self.k_proj, self.v_proj], packed)
        if packed:
            self.o_proj = PackedLinear.of(self.o_proj)
            del self.q_proj, self.k_proj, self.v_proj


class FeedForward(nn.Module):
    """SwiGLU: down(act(gate(x)) · up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj: nn.Module = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=False
        )
        self.act = ACT2FN[config.hidden_act]
        self.fused: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.fused(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)

    def fuse(self, packed: bool) -> None:
        self.fused = fused([self.gate_proj, self.up_proj], packed)
        if packed:
            self.down_proj = PackedLinear.of(self.down_proj)
            del self.gate_proj, self.up_proj


class Layer(nn.Module):
    """One pre-norm decoder layer over the block rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, index: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.self_attn.queries_keys_values(self.input_layernorm(x), cos, sin)
        x = x + self.self_attn.o_proj(attend(index, q, k, v))
        return x + self.mlp(self.post_attention_layernorm(x))


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
        self._fused_context: Product | None = None
        self._fused_key_norms: Tensor | None = None

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
        both = project(context).unflatten(-1, shape)
        keys, values = both.unbind(-3)  # each [..., c, L, kv_heads, d]
        keys = functional.rms_norm(keys, (config.head_dim,), None, config.rms_norm_eps)
        cos, sin = self.rotary(positions, context.dtype)  # [..., c, 1, d]
        keys = rotate(keys * norms[:, None, :], cos[..., None, :], sin[..., None, :])
        return KeysValues(keys, values)

    def context_kv(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """`context_kv_stacked` as a list, one entry a layer, each [..., kv_heads, c, d]."""
        stacked = self.context_kv_stacked(context, positions)
        return [KeysValues(k, v) for k, v in zip(stacked.keys, stacked.values, strict=True)]

    def run(self, block: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Block inputs [..., q, H] at int64 [..., q] → [..., q, H] after the final norm."""
        cos, sin = self.rotary(positions, block.dtype)
        for index, layer in enumerate(self.layers):
            block = layer(block, index, cos, sin, attend)
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

    def fuse(self, pack: bool | None = None) -> None:
        """Join weights for serving, and pack them; by default where the processor has kernels.

        The context projection needs another grouping than the block's, so keys' and values' weights
        are held twice. The separate parameters are gone where packed, and views where not. Not for
        training.
        """
        self.requires_grad_(False)
        able = can_pack(self.norm.weight.dtype, self.norm.weight.device)
        packed = able if pack is None else pack
        self._fused_context = fused(self._context_parts(), packed, shared=True)
        self._fused_key_norms = self._key_norms()
        for layer in self._decoder_layers():
            layer.self_attn.fuse(packed)
            layer.mlp.fuse(packed)
        if packed:
            self.fc = PackedLinear.of(self.fc)

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


def folded_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention with the query heads of a group folded into rows.

    On CPU this is several times faster than repeating keys, or than SDPA's own `enable_gqa`.

    Args:
        q: [b, q, heads, d].
        keys, values: [b, kv_heads, k, d].
        mask: bool [b, q, k], True where seen; None: everything.

    Returns:
        [b, q, heads * d].
    """
    batch, rows, heads, size = q.shape
    groups = heads // keys.shape[1]
    folded = (
        q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).reshape(batch, -1, groups * rows, size)
    )
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, groups, 1)
    out = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return out.view(batch, -1, groups, rows, size).permute(0, 3, 1, 2, 4).reshape(batch, rows, -1)
