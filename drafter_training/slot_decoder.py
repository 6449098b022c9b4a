"""Decodes many sequences at once, each in its own slot of a preallocated key-value cache.

The model is any attention-only Hugging Face causal LM: its attention is swapped, through
Transformers' attention interface, for one that reads and writes the slots. A finished sequence
gives its slot to the next one at once, so the batch stays full; features are captured on the way,
so that training need not run the target a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

_ATTENTION_NAME = "training_slots"  # a name with "flash" in it would be looked up on the Hub


@dataclass(frozen=True)
class _Row:
    """Where the tokens of one packed forward pass live.

    slots: int64 [n] (decode) or one slot (prefill); positions: int64 [n].
    hidden: float32 [S, 1, 1, T], -inf past a slot's length (decode), or None (prefill, causal).
    """

    decoder: SlotDecoder
    slots: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor | None


def _slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    slot_row: _Row,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, n, D]; key, value [1, kv_heads, n, D] -> ([1, n, heads, D], None)."""
    decoder, layer = slot_row.decoder, module.layer_idx
    keys, values = decoder.keys[layer], decoder.values[layer]
    keys[slot_row.slots, :, slot_row.positions] = key[0].transpose(0, 1)
    values[slot_row.slots, :, slot_row.positions] = value[0].transpose(0, 1)
    heads, kv_heads = query.shape[1], key.shape[1]
    if slot_row.hidden is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2), None
    # One query per slot: the query heads of a group become rows, so keys are read once. The whole
    # buffer is multiplied, for slices of it would be copied, which costs more than the padding.
    group, size = heads // kv_heads, query.shape[-1]
    rows = query[0].transpose(0, 1).reshape(-1, group, size)
    scores = torch.bmm(rows, keys.flatten(0, 1).transpose(1, 2)).float().mul_(scaling)
    scores = scores.view(len(keys), kv_heads, group, -1).add_(slot_row.hidden).softmax(-1)
    out = torch.bmm(scores.flatten(0, 1).to(value.dtype), values.flatten(0, 1))
    return out.view(1, -1, heads, size), None


AttentionInterface.register(_ATTENTION_NAME, _slot_attention)


class SlotDecoder:
    """Owns the slots: keys and values [L, S, kv_heads, T, D] and features [S, T, (n + 1) H].

    A feature row holds the tapped layers' outputs and, last, the final normed state (from which
    the target's own distribution can be recomputed for distillation). Without ``target_layer_ids``
    no features are kept.
    """

    def __init__(
        self, model: PreTrainedModel, target_layer_ids: list[int], num_slots: int, max_length: int
    ) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        shape = (config.num_hidden_layers, num_slots, kv_heads, max_length, head_dim)
        self.model = model
        self.model.set_attn_implementation(_ATTENTION_NAME)
        self.target_layer_ids = target_layer_ids
        self.num_slots, self.max_length = num_slots, max_length
        self.keys = torch.zeros(shape, dtype=model.dtype)
        self.values = torch.zeros(shape, dtype=model.dtype)
        width = (len(target_layer_ids) + 1) * config.hidden_size
        rows = max_length if target_layer_ids else 0
        self.features = torch.zeros(num_slots, rows, width, dtype=torch.bfloat16)
        self._all_slots = torch.arange(num_slots)

    @torch.inference_mode()
    def prefill(self, slot: int, token_ids: list[int]) -> torch.Tensor:
        """Starts a sequence in ``slot``; returns the logits after its last token, float32 [V]."""
        positions = torch.arange(len(token_ids))
        row = _Row(self, torch.full_like(positions, slot), positions, None)
        return self._forward(torch.tensor(token_ids), row, logits_to_keep=1)[0]

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token for every slot (int64 [S] each) -> logits float32 [S, V]."""
        unseen = torch.arange(self.max_length)[None] > positions[:, None]
        hidden = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
        row = _Row(self, self._all_slots, positions, hidden[:, None, None])
        return self._forward(token_ids, row, logits_to_keep=0)

    def _forward(self, token_ids: torch.Tensor, row: _Row, logits_to_keep: int) -> torch.Tensor:
        output = self.model(
            input_ids=token_ids[None],
            position_ids=row.positions[None],
            use_cache=False,
            output_hidden_states=bool(self.target_layer_ids),
            logits_to_keep=logits_to_keep,
            slot_row=row,
        )
        if not self.target_layer_ids:
            return output.logits[0].float()
        states = [output.hidden_states[i + 1][0] for i in self.target_layer_ids]
        states.append(output.hidden_states[-1][0])
        self.features[row.slots, row.positions] = torch.cat(states, -1).to(self.features.dtype)
        return output.logits[0].float()
