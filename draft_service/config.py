"""What a drafter's config.json says, read as the official code reads it and checked once.

Fields go through Transformers' `Qwen3Config`, whose defaults decide behaviour: an absent `head_dim`
is 128, and `use_sliding_window: false` takes the window from sliding layers but leaves them causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen3Config

from draft_service.config_reader import ConfigReader, default_target_layer_ids
from draft_service.masks import LayerMask
from draft_service.raw_config import CONFIG_FILE, raw_config
from draft_service.speculators import is_speculators, to_zlab
from flashduet.errors import CheckpointError

__all__ = ["CONFIG_FILE", "DrafterConfig", "default_target_layer_ids"]

DEFAULT_BLOCK_LENGTH = 16


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Sizes and rules of one DFlash network.

    Attributes:
        target_layer_ids: tapped decoder layers of the target, in the order of concatenation; id i
            is the output of decoder layer i (the last layer's after the target's final norm).
        num_target_layers: decoder layers of the target it was trained for; None if not said.
        block_length: anchor + mask tokens of the blocks it was trained with.
        layer_masks: one a layer.
        inverse_frequencies: float32 rotary frequencies, head_dim / 2 of them, radians a position.
        rotary_scale: factor on cos and sin (yarn's attention factor).
        final_logit_softcapping: None or 0 for none.
        target_hidden_size: of the features, where it is not the drafter's own.
        sample_from_anchor: slot j predicts position a+j+1, so that the anchor's slot drafts too.
        conv_kernel_size, conv_group_size: of DFlash 2's convolutions; 0 for none.
        selector_rank, selector_top_k: of DFlash 2's candidate selector; 0 for none.
        draft_vocab_size: rows of the drafter's own head, if it covers only a part of vocab_size.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    vocab_size: int
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    block_length: int
    mask_token_id: int
    layer_masks: tuple[LayerMask, ...]
    inverse_frequencies: tuple[float, ...]
    rotary_scale: float = 1.0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    target_hidden_size: int = 0
    sample_from_anchor: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    draft_vocab_size: int | None = None

    @property
    def feature_width(self) -> int:
        """Numbers in one row of context features."""
        return len(self.target_layer_ids) * self.feature_size

    @property
    def feature_size(self) -> int:
        """Hidden size of the target."""
        return self.target_hidden_size or self.hidden_size

    @classmethod
    def load(cls, folder: Path, *, own_mask: bool = False) -> DrafterConfig:
        """Read a checkpoint folder's `config.json`, of whatever format.

        Args:
            own_mask: the checkpoint has its own embedding of the mask token, and needs no id of it.

        Raises:
            CheckpointError: names the file, the key, what was expected and what was found.
        """
        raw, source = raw_config(folder), f"{folder.name}/{CONFIG_FILE}"
        if is_speculators(raw):
            raw = to_zlab(raw, source)
        try:
            parsed = Qwen3Config(**raw)
        except Exception as error:  # Transformers and its validators raise many kinds
            raise CheckpointError(
                f"{source}: not readable as a Qwen3 configuration: {error}"
            ) from error
        return cls.from_qwen3(parsed, source, own_mask=own_mask)

    @classmethod
    def from_qwen3(
        cls, parsed: Qwen3Config, source: str = CONFIG_FILE, *, own_mask: bool = False
    ) -> DrafterConfig:
        """Take a parsed configuration over; `source` names its file in errors.

        Raises:
            CheckpointError: a key is missing or outside its limits.
        """
        read = ConfigReader(parsed, source)
        num_layers = read.whole("num_hidden_layers", least=1)
        num_target_layers = read.optional_whole("num_target_layers", least=1)
        head_dim = read.whole("head_dim", least=2)
        num_heads = read.whole("num_attention_heads", least=1)
        num_kv_heads = read.whole("num_key_value_heads", least=1)
        if num_heads % num_kv_heads:
            raise read.error(
                "num_key_value_heads", f"a divisor of num_attention_heads {num_heads}", num_kv_heads
            )
        if head_dim % 2:
            raise read.error("head_dim", "an even number", head_dim)
        vocab_size = read.whole("vocab_size", least=1)
        frequencies, rotary_scale = read.rotary(head_dim)
        softcap = read.number("final_logit_softcapping", None)
        hidden_size = read.whole("hidden_size", least=1)
        read.refuse_other_heads()
        dflash2 = read.dflash2(hidden_size)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=read.whole("intermediate_size", least=1),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(parsed.rms_norm_eps),
            hidden_act=str(parsed.hidden_act),
            attention_bias=bool(parsed.attention_bias),
            vocab_size=vocab_size,
            num_target_layers=num_target_layers,
            target_layer_ids=read.target_layer_ids(num_target_layers, num_layers),
            block_length=read.draft_whole("block_size", DEFAULT_BLOCK_LENGTH, least=2),
            mask_token_id=read.draft_whole("mask_token_id", 0 if own_mask else None, least=0),
            layer_masks=read.layer_masks(num_layers),
            inverse_frequencies=frequencies,
            rotary_scale=rotary_scale,
            input_embedding_scale=read.number("input_embedding_scale", 1.0) or 0.0,
            output_multiplier=read.number("output_multiplier", 1.0) or 0.0,
            final_logit_softcapping=softcap if softcap is not None and softcap > 0 else None,
            target_hidden_size=read.optional_whole("target_hidden_size", least=1) or hidden_size,
            sample_from_anchor=read.flag("sample_from_anchor"),
            draft_vocab_size=read.optional_whole("draft_vocab_size", least=1),
            **dflash2,
        )
