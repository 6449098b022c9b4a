"""What a checkpoint is, as JSON: `python -m draft_service.inspection PATH [--target REF]`.

Its weights are read, so that what is said here is what a draft service would serve or refuse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draft_service.checkpoint import DrafterCheckpoint, load_checkpoint
from draft_service.draft_vocabulary import assemble
from draft_service.masks import LayerMask
from draft_service.pairing import check_drafter
from draft_service.raw_config import raw_config
from draft_service.self_test import read_self_test
from draft_service.shortlist import read_shortlist
from draft_service.target_tensors import load_target_tensors, ties_head
from flashduet import models
from flashduet.errors import FlashduetError, Incompatible
from flashduet.models_default import shipped_drafter
from flashduet.v1 import common_pb2 as pb


def inspect(folder: Path, target: str | None = None) -> dict[str, Any]:
    """What a checkpoint is, what it was trained for, and whether it fits a target.

    Args:
        target: a reference as the target service takes it; None: no question of fit.

    Raises:
        CheckpointError: it is no drafter that can be served; names the key or tensor.
        ConfigurationError: the target cannot be had.
    """
    checkpoint = load_checkpoint(folder)
    shortlist = read_shortlist(folder, checkpoint.network.config.vocab_size)
    expected = read_self_test(folder)
    told = {
        "name": folder.name,
        "format": checkpoint.kind.value,
        "network": _network(checkpoint),
        "trained_for": _trained_for(folder, checkpoint),
        "block_length": checkpoint.network.config.block_length,
        "mask_token_id": checkpoint.network.config.mask_token_id,
        "own": _own(checkpoint),
        "shortlist": None if shortlist is None else len(shortlist),
        "expected_tau": None if expected is None else expected.expected_tau,
    }
    if target is not None:
        told["target"] = _fit(checkpoint, target)
    return told


def _network(checkpoint: DrafterCheckpoint) -> dict[str, Any]:
    network, config = checkpoint.network, checkpoint.network.config
    weights = list(network.parameters())
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "parameters": sum(weight.numel() for weight in weights),
        "bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch."),
        "attention": [_attention(mask) for mask in config.layer_masks],
        "convolution": config.conv_kernel_size or None,
        "selector_candidates": config.selector_top_k or None,
    }


def _attention(mask: LayerMask) -> str:
    causal = "causal" if mask.is_causal else "bidirectional"
    return causal if mask.window is None else f"{causal}, window {mask.window}"


def _trained_for(folder: Path, checkpoint: DrafterCheckpoint) -> dict[str, Any]:
    config, raw = checkpoint.network.config, raw_config(folder)
    nested = raw.get("speculators_config")
    verifier = nested.get("verifier") if isinstance(nested, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return {
        "name": name if isinstance(name, str) else None,
        "hidden_size": config.feature_size,
        "layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
        "layer_ids": list(config.target_layer_ids),
    }


def _own(checkpoint: DrafterCheckpoint) -> dict[str, int]:
    """What it brings instead of the target's, with the rows of each."""
    own = checkpoint.own
    parts = {"embedding": own.embedding, "head": own.head}
    told = {name: len(part) for name, part in parts.items() if part is not None}
    return told | ({} if own.mask_embedding is None else {"mask_embedding": 1})


def _fit(checkpoint: DrafterCheckpoint, reference: str) -> dict[str, Any]:
    folder = models.resolve_model(reference)
    facts = models.model_facts(folder, models.served_name(reference), pb.DATA_TYPE_FLOAT32)
    tensors = load_target_tensors(folder, tied=ties_head(models.load_config(folder)))
    why = None
    try:
        check_drafter(checkpoint.network.config, assemble(tensors, checkpoint.own), facts)
    except Incompatible as error:
        why = error.message
    return {
        "name": facts.name,
        "hidden_size": facts.hidden_size,
        "layers": facts.num_layers,
        "vocab_size": facts.vocab_size,
        "fits": why is None,
        "why_not": why,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draft_service.inspection")
    parser.add_argument("path", help="a drafter's folder, a Hub id, or default")
    parser.add_argument("--target", help="a target: default, a folder, a .gguf file, or a Hub id")
    given = parser.parse_args(arguments)
    try:
        folder = shipped_drafter() if given.path == "default" else models.resolve_model(given.path)
        print(json.dumps(inspect(folder, given.target)))
    except FlashduetError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
