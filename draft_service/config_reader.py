"""Typed reading of a drafter's configuration, with errors that name the key."""

from __future__ import annotations

import math
from typing import Any

from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draft_service.masks import LayerMask
from flashduet.errors import CheckpointError

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Frequencies of the others change with the length of the sequence, and would not fit cached keys.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What the keys may say that tell DFlash from its relatives.
_KNOWN_VARIANTS: dict[str, tuple[object, ...]] = {
    "attention_mode": (None, "gqa", "mha"),
    "attention_modes": (None, "gqa", "mha"),
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
}


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Tapped layers where a checkpoint names none: the middle one for one drafter layer, else
    `num_layers` values evenly from 1 to num_target_layers - 3, rounded half to even."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


class ConfigReader:
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

    def flag(self, key: str) -> bool:
        found = self._draft_value(key, False)
        if not isinstance(found, bool):
            raise self.error(key, "true or false", found)
        return found

    def refuse_other_heads(self) -> None:
        """Relatives of DFlash whose heads or attention are others; they would draft nonsense."""
        for key, known in _KNOWN_VARIANTS.items():
            found = self._draft_value(key, None)
            for each in found if isinstance(found, list) else [found]:
                if each not in known:
                    readable = " or ".join(str(value) for value in known if value)
                    raise self.error(key, readable or "none", each)

    def dflash2(self, hidden_size: int) -> dict[str, int]:
        """DFlash 2's own keys: all of them, or none and an empty result."""
        names = self._parsed.architectures or []
        told = any(self._draft_value(key, None) is not None for key in DFLASH2_KEYS)
        if not told and not any("dflash2" in str(name).lower() for name in names):
            return {}
        found = {key: self.draft_whole(key, None, least=1) for key in DFLASH2_KEYS}
        if hidden_size % found["conv_group_size"]:
            raise self.error(
                "conv_group_size",
                f"a divisor of hidden_size {hidden_size}",
                found["conv_group_size"],
            )
        return found
