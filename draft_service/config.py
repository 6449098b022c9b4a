"""What a drafter's config.json says, read as the official code reads it and checked once.

Fields go through Transformers' `Qwen3Config`, whose defaults decide behaviour: an absent `head_dim`
is 128, and `use_sliding_window: false` takes the window from sliding layers but leaves them causal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draft_service.masks import LayerMask
from flashduet.errors import CheckpointError

CONFIG_FILE = "config.json"
DEFAULT_BLOCK_LENGTH = 16
# Frequencies of the others change with the length of the sequence, and would not fit cached keys.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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

    @property
    def feature_width(self) -> int:
        """Numbers in one row of context features."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def load(cls, folder: Path) -> DrafterConfig:
        """Read `config.json` of a z-lab checkpoint folder.

        Raises:
            CheckpointError: names the file, the key, what was expected and what was found.
        """
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise CheckpointError(f"{CONFIG_FILE}: missing in the drafter's folder {folder.name!r}")
        try:
            parsed = Qwen3Config.from_json_file(str(path))
        except Exception as error:  # Transformers and its validators raise many kinds
            raise CheckpointError(
                f"{folder.name}/{CONFIG_FILE}: not readable as a Qwen3 configuration: {error}"
            ) from error
        return cls.from_qwen3(parsed, f"{folder.name}/{CONFIG_FILE}")

    @classmethod
    def from_qwen3(cls, parsed: Qwen3Config, source: str = CONFIG_FILE) -> DrafterConfig:
        """Take a parsed configuration over; `source` names its file in errors.

        Raises:
            CheckpointError: a key is missing or outside its limits.
        """
        read = _Reader(parsed, source)
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
        return cls(
            hidden_size=read.whole("hidden_size", least=1),
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
            mask_token_id=read.draft_whole("mask_token_id", None, least=0),
            layer_masks=read.layer_masks(num_layers),
            inverse_frequencies=frequencies,
            rotary_scale=rotary_scale,
            input_embedding_scale=read.number("input_embedding_scale", 1.0) or 0.0,
            output_multiplier=read.number("output_multiplier", 1.0) or 0.0,
            final_logit_softcapping=softcap if softcap is not None and softcap > 0 else None,
        )


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Tapped layers where a checkpoint names none: the middle one for one drafter layer, else
    `num_layers` values evenly from 1 to num_target_layers - 3, rounded half to even."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


class _Reader:
    """Typed reading of a Qwen3Config, with errors that name the key."""

    def __init__(self, parsed: Qwen3Config, source: str) -> None:
        self._parsed, self._source = parsed, source
        nested = getattr(parsed, "dflash_config", None)
        if nested is not None and not isinstance(nested, dict):
            raise self.error("dflash_config", "an object", nested)
        self._nested: dict[str, Any] = nested or {}

    def error(self, key: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self._source}: {key}: expected {expected}, found {found!r}")

    def _draft_value(self, key: str, default: object) -> Any:
        """The draft's own keys stand in `dflash_config`, or else at the top level."""
        return self._nested.get(key, getattr(self._parsed, key, default))

    def whole(self, key: str, least: int) -> int:
        return self._whole(key, getattr(self._parsed, key, None), least)

    def optional_whole(self, key: str, least: int) -> int | None:
        found = getattr(self._parsed, key, None)
        return None if found is None else self._whole(key, found, least)

    def draft_whole(self, key: str, default: int | None, least: int) -> int:
        return self._whole(key, self._draft_value(key, default), least)

    def _whole(self, key: str, found: object, least: int) -> int:
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise self.error(key, f"a whole number of at least {least}", found)
        return found

    def number(self, key: str, default: float | None) -> float | None:
        found = self._draft_value(key, default)
        if found is None:
            return default
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float)
            or not math.isfinite(found)
        ):
            raise self.error(key, "a finite number", found)
        return float(found)

    def target_layer_ids(self, num_target_layers: int | None, num_layers: int) -> tuple[int, ...]:
        found = self._draft_value("target_layer_ids", None)
        if found is None:
            if num_target_layers is None:
                raise self.error("target_layer_ids", "a list, or num_target_layers beside it", None)
            found = list(default_target_layer_ids(num_target_layers, num_layers))
        limit = num_target_layers if num_target_layers is not None else 1 << 16
        fits = isinstance(found, list) and all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < limit for i in found
        )
        if not fits or not found:
            raise self.error("target_layer_ids", f"layer numbers from 0 to {limit - 1}", found)
        return tuple(found)

    def layer_masks(self, num_layers: int) -> tuple[LayerMask, ...]:
        types = getattr(self._parsed, "layer_types", None) or ["full_attention"] * num_layers
        if len(types) != num_layers:
            raise self.error("layer_types", f"{num_layers} entries", types)
        told = getattr(self._parsed, "is_causal", None)
        window = self._parsed.sliding_window
        masks = []
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise self.error("layer_types", "full_attention or sliding_attention", kind)
            sliding = kind == "sliding_attention"
            is_causal = sliding if told is None else bool(told)
            masks.append(LayerMask(is_causal, window if sliding else None))
        return tuple(masks)

    def rotary(self, head_dim: int) -> tuple[tuple[float, ...], float]:
        kind = self._parsed.rope_parameters["rope_type"]
        if kind not in FIXED_ROPE_TYPES:
            raise self.error("rope_type", f"one of {', '.join(FIXED_ROPE_TYPES)}", kind)
        try:
            # Transformers' own formulas for each kind, evaluated once; positions need no table.
            table = Qwen3RotaryEmbedding(self._parsed)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise self.error("rope_parameters", f"what {kind} needs", str(error)) from error
        frequencies = tuple(table.inv_freq.float().tolist())
        if len(frequencies) * 2 != head_dim:
            raise self.error("rope_parameters", f"{head_dim // 2} frequencies", len(frequencies))
        return frequencies, float(table.attention_scaling)
