"""Attention of many blocks over one context, without the scores of one block against another.

A packed pass has the rows of all its blocks behind one another. Under a dense mask each row is
multiplied with the keys of all blocks and sees those of its own: with 32 blocks of 8 after 300
tokens half of the work is masked. Here the context's keys go through PyTorch's fused kernel, a
block's own through small products, and the two are joined by their log-sum-exp, as fused kernels do
between tiles (FlashAttention-2, arXiv 2307.08691, section 3.1). Forward and backward are exact.

Shapes: N sequences, A blocks, B slots, Q = A B rows, c context rows, h query heads, k key heads,
g = h / k, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_HIDDEN = -1e30
"""Added to a score that is not seen. Finite, for a row may see nothing of the context (behind a
sliding window): its sum over the context is then negligible, and with infinities it would be NaN.
"""


def attend_in_blocks(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, mask: Tensor
) -> Tensor:
    """What `folded_attention` gives for the same keys and mask, on the CPU.

    Args:
        q: [N, Q, h, d].
        keys, values: of the context, [N, k, c, d].
        own_keys, own_values: of the block rows, [N, Q, k, d].
        mask: bool [N, A, B, c + B], True where a row sees a key of the context, or a slot of its
            own block, of which it sees at least one.

    Returns:
        [N, Q, h * d].
    """
    sequences, blocks, slots = mask.shape[:3]
    heads, size = q.shape[2:]
    groups = heads // keys.shape[1]
    # A block's rows of one key head lie together, whichever query head of its group they are of.
    shape = (sequences, blocks, slots, -1, groups, size)
    rows = q.reshape(shape).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)  # [N, k, A, g B, d]
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, _HIDDEN)
    bias = bias[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # [N, A, g B, c + B]
    own = [x.unflatten(1, (blocks, slots)).movedim(3, 1) for x in (own_keys, own_values)]
    out = _BlockAttention.apply(rows, keys, values, *own, bias)  # own: [N, k, A, B, d]
    assert isinstance(out, Tensor)
    out = out.unflatten(3, (groups, slots)).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(sequences, blocks * slots, heads * size)


class _BlockAttention(Function):
    """Rows [N, k, A, r, d] over context keys [N, k, c, d] and own ones [N, k, A, B, d].

    bias: [N, A, r, c + B], added to the scaled scores; no gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        bias: Tensor,
    ) -> Tensor:
        context = keys.shape[2]
        scale = q.shape[-1] ** -0.5
        flat, flat_bias = q.flatten(2, 3), bias[..., :context].flatten(1, 2)[:, None].contiguous()
        over, over_lse = _flash(flat, keys, values, 0.0, False, attn_mask=flat_bias, scale=scale)
        own_bias = bias[:, None, :, :, context:]
        scores = (q @ own_keys.mT).float() * scale + own_bias
        own_lse = scores.logsumexp(-1)
        lse = torch.logaddexp(over_lse.view_as(own_lse), own_lse)
        own = (scores - lse[..., None]).exp().to(q.dtype) @ own_values
        share = (over_lse.view_as(lse) - lse).exp()[..., None].to(q.dtype)
        out = torch.addcmul(own, over.view_as(own), share)
        ctx.save_for_backward(q, keys, values, own_keys, own_values, flat_bias, own_bias, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, keys, values, own_keys, own_values, flat_bias, own_bias, out, lse = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        # The kernel's probabilities are exp(score - lse): given the whole's, they are the whole's.
        over, keys_grad, values_grad = _flash_backward(
            grad.flatten(2, 3),
            q.flatten(2, 3),
            keys,
            values,
            out.flatten(2, 3),
            lse.flatten(2, 3),
            0.0,
            False,
            attn_mask=flat_bias,
            scale=scale,
        )
        scores = (q @ own_keys.mT).float() * scale + own_bias
        probs = (scores - lse[..., None]).exp()
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        score_grad = (probs * ((grad @ own_values.mT).float() - delta) * scale).to(q.dtype)
        q_grad = over.view_as(q) + score_grad @ own_keys
        return q_grad, keys_grad, values_grad, score_grad.mT @ q, probs.to(q.dtype).mT @ grad, None
