"""Drafter checkpoints in the z-lab format: config.json and model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import PreTrainedModel, Qwen3Config

from draft_service.network import DFlashNetwork
from flashduet.models_cache import put_in_place

_WRITTEN = (
    *("architectures", "model_type", "dtype", "transformers_version"),
    *("vocab_size", "hidden_size", "intermediate_size", "hidden_act", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias"),
    *("max_position_embeddings", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("num_target_layers", "block_size", "dflash_config"),
)
"""Keys of config.json: what a drafter needs, without Transformers' unrelated defaults."""


@torch.no_grad()
def warm_start(
    network: DFlashNetwork, target: PreTrainedModel, sources: list[int], feature: int
) -> None:
    """Copies target layers ``sources`` into the drafter; ``fc`` passes tapped layer ``feature``.

    The context is not normalized by ``input_layernorm``, so ``hidden_norm`` takes its place: it
    starts as the mean of the copied layers'. Head norms stay 1, for the target has none, and
    convolutions beside a selector are not its affair (`start_selector`).
    """
    decoder = target.get_decoder()
    names = network.state_dict().keys()
    for layer, source in zip(network.layers, sources, strict=True):
        weights = decoder.layers[source].state_dict()
        missing, unexpected = layer.load_state_dict(weights, strict=False)
        if unexpected or any("_norm" not in name and "_conv." not in name for name in missing):
            raise ValueError(f"target layer {source} has other parts than {sorted(names)}")
    hidden = network.hidden_norm.weight.shape[0]
    fc = network.fc.weight
    torch.nn.init.normal_(fc, std=0.002)
    fc[:, feature * hidden : (feature + 1) * hidden] += torch.eye(hidden)
    norms = [decoder.layers[source].input_layernorm.weight for source in sources]
    network.hidden_norm.weight.copy_(torch.stack(norms).mean(0))
    network.norm.load_state_dict(decoder.norm.state_dict())


@torch.no_grad()
def start_selector(network: DFlashNetwork, embedding: torch.Tensor) -> None:
    """A selector that changes nothing yet, and convolutions that never do.

    Tokens as predecessors start from the main components of the target's embedding [V, H], at unit
    variance, so that like tokens are alike from the first step; as successors they start at zero.
    """
    for layer in network.layers:
        for conv in layer.convolutions:
            conv.make_identity()
    selector = network.candidate_selector
    if selector is not None:
        rank = selector.predecessor_codebook.shape[1]
        rows = embedding.detach().float()
        rows = rows - rows.mean(0)
        values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
        components = rows @ (vectors / values.clamp_min(1e-12).sqrt()).flip(-1)[:, :rank]
        selector.predecessor_codebook.zero_()[:, : components.shape[1]] = components
        selector.successor_codebook.zero_()


def save_drafter(folder: Path, network: DFlashNetwork, config: Qwen3Config) -> None:
    """Writes bfloat16 weights and the config; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.to(torch.bfloat16).contiguous() for name, t in network.state_dict().items()}
    # `save_file` would make it readable for this user alone, and services may run as another.
    (folder / "model.safetensors.tmp").write_bytes(save(weights, metadata={"format": "pt"}))
    facts = config.to_dict()
    facts = {key: facts[key] for key in _WRITTEN if key in facts}
    (folder / "config.json.tmp").write_text(json.dumps(facts, indent=2) + "\n")
    for name in ("model.safetensors", "config.json"):
        put_in_place(folder / f"{name}.tmp", folder / name)
