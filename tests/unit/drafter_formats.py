"""The same random drafter in the public formats, made from a z-lab folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
NESTED = ("dflash_config", "architectures", "num_target_layers", "block_size", "is_causal")


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return config


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def change(
    folder: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any
) -> None:
    """Set tensors and configuration keys; None removes one."""
    both: list[dict[str, Any]] = [load_file(folder / WEIGHTS), config_of(folder)]
    for held, changes in zip(both, (tensors or {}, config), strict=True):
        for name, value in changes.items():
            held.pop(name, None)
            if value is not None:
                held[name] = value
    write(folder, both[1], both[0])


def make_dflash2(
    folder: Path, *, kernel: int = 3, group: int = 8, rank: int = 6, top_k: int = 5, seed: int = 5
) -> Path:
    """Give a z-lab folder random convolutions and a random selector; returns it."""
    config, generator = config_of(folder), torch.Generator().manual_seed(seed)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]

    def random(*shape: int, spread: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * spread

    tensors: dict[str, torch.Tensor | None] = {}
    for layer in range(config["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer}.{part}."
            outputs = 2 * kernel * hidden // group
            tensors[prefix + "base_kernel"] = random(2, kernel, hidden, spread=0.6)
            tensors[prefix + "kernel_projection.weight"] = random(outputs, hidden, spread=0.05)
    for side in ("predecessor", "successor"):
        tensors[f"candidate_selector.{side}_codebook"] = random(vocabulary, rank, spread=1.5)
    tensors["candidate_selector.hidden_projection.weight"] = random(rank, hidden, spread=0.3)
    nested = config["dflash_config"] | {
        "conv_kernel_size": kernel,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": top_k,
    }
    change(folder, tensors, architectures=["DFlash2DraftModel"], dflash_config=nested)
    return folder


def as_speculators(source: Path, folder: Path, **more: Any) -> Path:
    """A z-lab folder in the speculators format; `more` goes into the top level."""
    config = config_of(source)
    nested = config["dflash_config"]
    layers = {key: value for key, value in config.items() if key not in NESTED}
    made = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy"},
        "transformer_layer_config": layers,
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"],
        "sample_from_anchor": False,
    }
    return write(folder, made | more, load_file(source / WEIGHTS))


def as_specforge(source: Path, folder: Path) -> Path:
    """A z-lab folder as other trainers export it: joined projections, a prefix, other names."""
    tensors: dict[str, torch.Tensor] = {"model.rotary_emb.inv_freq": torch.ones(8)}
    joined: dict[str, list[torch.Tensor]] = {}
    stored = load_file(source / WEIGHTS)
    for name in sorted(stored, key=lambda name: (_order(name), name)):
        for parts, whole in (("qkv", "qkv_proj"), (("gate", "up"), "gate_up_proj")):
            if any(f".{part}_proj." in name for part in parts):
                merged = re.sub(r"\.\w+_proj\.", f".{whole}.", name)
                joined.setdefault("model." + merged, []).append(stored[name])
                break
        else:
            tensors["model." + name] = stored[name]
    tensors |= {name: torch.cat(parts) for name, parts in joined.items()}
    config = config_of(source) | {
        "architectures": ["Qwen3DFlashForCausalLM"],
        "auto_map": {"AutoModel": "modeling_dflash.Qwen3DFlashForCausalLM"},
    }
    return write(folder, config, tensors)


def _order(name: str) -> int:
    """Where a projection stands in a joined one."""
    order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return next((i for i, part in enumerate(order) if f".{part}." in name), -1)
