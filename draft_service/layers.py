"""What the DFlash network is made of: pre-norm Qwen3 layers over the rows of a block.

Parameter names are those of z-lab checkpoints. Everything is differentiable until `fuse`, which
joins and packs weights for serving.

Shapes: H hidden size, q block rows, c context rows, d head size. Leading dimensions `...` are batch
dimensions, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from draft_service.config import DrafterConfig
from draft_service.convolution import GroupedCausalConvolution
from draft_service.joined_linear import Product, fused
from draft_service.native_rows import RowKernels, kernels_for
from flashduet.packed_linear import PackedLinear

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
        self.kernels: RowKernels | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
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
        self.kernels: RowKernels | None = None

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int64 [..., n] → cos, sin [..., n, 1, d], to be applied to [..., n, heads, d]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        if self.kernels is not None:
            return self.kernels.angles(positions, self.frequencies, self.scale)
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
        self.norms: Tensor | None = None
        self.kernels: RowKernels | None = None
        # Where the heads of `norms` begin in a row of the joined product.
        self._offsets: Tensor | None = None

    def queries_keys_values(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """[..., q, H] → q [..., q, heads, d] and k, v [..., q, kv_heads, d]; q and k rotated."""
        if self.fused is None:
            q, k, v = (
                project(h).unflatten(-1, (-1, self.head_dim))
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
            return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v
        # Heads of queries and keys go through norm and rotation side by side.
        assert self.norms is not None
        heads = [size // self.head_dim for size in self.sizes]
        joined = self.fused(h)
        if self.kernels is not None:
            assert self._offsets is not None
            eps = self.q_norm.eps
            self.kernels.norm_and_rotate(joined, self._offsets, self.norms, eps, cos, sin)
            q, k, v = joined.unflatten(-1, (-1, self.head_dim)).split(
                [size // self.head_dim for size in self.sizes], dim=-2
            )
            return q, k, v
        joined = joined.unflatten(-1, (-1, self.head_dim))
        both, v = joined.split([heads[0] + heads[1], heads[2]], dim=-2)
        both = functional.rms_norm(both, (self.head_dim,), None, self.q_norm.eps) * self.norms
        q, k = rotate(both, cos, sin).split(heads[:2], dim=-2)
        return q, k, v

    def fuse(self, packed: bool) -> None:
        self.fused = fused([self.q_proj, self.k_proj, self.v_proj], packed)
        rows = [size // self.head_dim for size in self.sizes[:2]]
        weights = (self.q_norm.weight, self.k_norm.weight)
        self.norms = torch.cat(
            [weight.expand(count, -1) for weight, count in zip(weights, rows, strict=True)]
        )
        if packed:
            self.o_proj = PackedLinear.of(self.o_proj)
            del self.q_proj, self.k_proj, self.v_proj
        self.kernels = kernels_for(self.norms)
        self._offsets = torch.arange(len(self.norms)) * self.head_dim


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


class Place(NamedTuple):
    """Where block rows are: rotary cos and sin [..., q, 1, d], and their place in their block,
    int64 [..., q] (None: the rows are one block in order)."""

    cos: Tensor
    sin: Tensor
    slots: Tensor | None


def _convolution(config: DrafterConfig) -> GroupedCausalConvolution | None:
    if not config.conv_kernel_size:
        return None
    return GroupedCausalConvolution(
        config.hidden_size, config.conv_kernel_size, config.conv_group_size
    )


def _around(
    conv: GroupedCausalConvolution | None,
    h: Tensor,
    sublayer: Callable[[Tensor], Tensor],
    place: Place,
) -> Tensor:
    """The sub-layer's output, between its convolutions if it has any."""
    if conv is None or conv.skipped:
        return sublayer(h)
    h, kernel = conv.before(h, place.slots)
    return conv.after(sublayer(h), kernel, place.slots)


class Layer(nn.Module):
    """One pre-norm decoder layer over the block rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = _convolution(config)
        self.mlp_conv = _convolution(config)

    def forward(self, x: Tensor, index: int, place: Place, attend: Attend) -> Tensor:
        def attention(h: Tensor) -> Tensor:
            q, k, v = self.self_attn.queries_keys_values(h, place.cos, place.sin)
            return cast(Tensor, self.self_attn.o_proj(attend(index, q, k, v)))

        x = x + _around(self.attention_conv, self.input_layernorm(x), attention, place)
        return x + _around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp, place)

    @property
    def convolutions(self) -> list[GroupedCausalConvolution]:
        return [conv for conv in (self.attention_conv, self.mlp_conv) if conv is not None]

    def fuse(self, packed: bool) -> None:
        self.self_attn.fuse(packed)
        self.mlp.fuse(packed)
        for conv in self.convolutions:
            if packed and not conv.skipped:
                conv.kernel_projection = PackedLinear.of(conv.kernel_projection)


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
