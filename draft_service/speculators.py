"""The speculators format's configuration, said in the z-lab format's words.

There the layers' sizes are nested, tapped layers are counted from the embedding's output (their ids
are ours + 1), full layers are never causal, and a drafter may have a head over a part of the
vocabulary.
"""

from __future__ import annotations

from typing import Any

from flashduet.errors import CheckpointError

_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
# At the top level there and here, with the same meaning.
_SAME = ("draft_vocab_size", "target_hidden_size", "sample_from_anchor", "projector_type")
DEFAULT_BLOCK_LENGTH = 8


def is_speculators(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of that format."""
    return any(key in raw for key in _KEYS)


def to_zlab(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """The same configuration as a z-lab config.json would have it.

    Args:
        source: names the file in errors.

    Raises:
        CheckpointError: names the key that is missing, wrong, or of another kind of speculator.
    """

    def error(key: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{source}: {key}: expected {expected}, found {found!r}")

    kind = raw.get("speculators_model_type")
    if kind != "dflash":
        raise error("speculators_model_type", "dflash", kind)
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise error("transformer_layer_config", "an object", layers)
    tapped = raw.get("aux_hidden_state_layer_ids")
    whole = isinstance(tapped, list) and all(type(i) is int for i in tapped)
    if not isinstance(tapped, list) or not whole or not tapped:
        raise error("aux_hidden_state_layer_ids", "a list of layer numbers", tapped)
    if min(tapped) < 1:
        raise error(
            "aux_hidden_state_layer_ids", "numbers from 1 (0 is the embedding's output)", tapped
        )
    anchored = raw.get("sample_from_anchor", False)
    block = raw.get("block_size", DEFAULT_BLOCK_LENGTH)
    if type(block) is not int or block < 2 - bool(anchored):
        raise error("block_size", "a whole number of at least 2", block)
    result = {key: value for key, value in layers.items() if key != "model_type"}
    if layers.get("model_type", "qwen3") != "qwen3" and "head_dim" not in layers:
        # Of families other than Qwen3 an absent head size follows from the others.
        result["head_dim"] = _quotient(layers, "hidden_size", "num_attention_heads")
    result |= {key: raw[key] for key in _SAME if raw.get(key) is not None}
    result["architectures"] = ["DFlashDraftModel"]
    # We count the anchor and its drafts: one more than inputs if the anchor's slot drafts too.
    result["block_size"] = block + bool(anchored)
    result["dflash_config"] = {"target_layer_ids": [i - 1 for i in tapped]}
    if raw.get("mask_token_id") is not None:
        result["dflash_config"]["mask_token_id"] = raw["mask_token_id"]
    if raw.get("sliding_window_non_causal"):
        result["is_causal"] = False
    return result


def _quotient(layers: dict[str, Any], whole: str, parts: str) -> Any:
    try:
        return layers[whole] // layers[parts]
    except (KeyError, TypeError, ZeroDivisionError):
        return None  # the keys themselves are refused later
