"""A new drafter for a target: its shape, its start, its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from draft_service.config import DrafterConfig, default_target_layer_ids
from draft_service.network import DFlashNetwork
from drafter_training.checkpoint import start_selector, warm_start
from drafter_training.objective import TargetHead
from drafter_training.variants import FusedInputNetwork
from flashduet.errors import ConfigurationError
from flashduet.models import text_config

_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class DrafterShape:
    """layers: decoder layers. layer_ids: tapped target layers; None: ``features`` spread evenly.

    selector_rank: of a candidate selector (DFlash 2), by which a slot knows the token drafted
    before it; 0: none. selector_top_k: how many tokens of each slot it chooses from.
    copied_layers: target layers to start from; None: the last ones, where they fit; empty: none.
    autoregressive, fused_input: of the ablations; only a block-diffusion drafter with injected keys
    and values can be served.
    """

    layers: int = 3
    features: int = 5
    block_length: int = 8
    layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    selector_rank: int = 0
    selector_top_k: int = 32
    copied_layers: tuple[int, ...] | None = None
    autoregressive: bool = False
    fused_input: bool = False


def tapped_layers(shape: DrafterShape, target_layers: int) -> list[int]:
    """Ids of the target's layers whose outputs are the features.

    Raises:
        ConfigurationError: one of them is not in the target.
    """
    if shape.layer_ids is None:
        count = min(shape.features, max(1, target_layers - 3))
        return sorted(set(default_target_layer_ids(target_layers, count)))
    for layer in shape.layer_ids:
        if not 0 <= layer < target_layers:
            raise ConfigurationError(
                f"layer ids: {layer} given, the target has layers 0 to {target_layers - 1}"
            )
    return list(shape.layer_ids)


def mask_token(shape: DrafterShape, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> int:
    """The id that stands for a token to be guessed: one that ordinary text does not use.

    Raises:
        ConfigurationError: there is none; one must be named.
    """
    if shape.mask_token_id is not None:
        if not 0 <= shape.mask_token_id < vocabulary:
            raise ConfigurationError(
                f"mask token id: {shape.mask_token_id} given, the vocabulary has {vocabulary}"
            )
        return shape.mask_token_id
    if len(tokenizer) < vocabulary:
        return len(tokenizer)
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    spare = [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in used and token.content not in template
    ]
    if not spare:
        raise ConfigurationError(
            "the tokenizer has no special token to spare as a mask; name one with --mask-token-id"
        )
    return int(max(spare))


def drafter_config(
    target: PreTrainedModel,
    *,
    layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: list[int],
    selector_rank: int = 0,
    selector_top_k: int = 0,
) -> Qwen3Config:
    """A drafter of the target's width and rotary base, ``layers`` deep."""
    config = text_config(target.config)
    heads = config.num_attention_heads
    hidden = config.hidden_size
    rope = getattr(config, "rope_parameters", None) or {}
    # Families with two kinds of layers keep one set of parameters for each.
    rope = rope.get("full_attention", rope)
    facts: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": target_layer_ids}
    if selector_rank:
        # The format has a selector only beside convolutions; these have one weight a channel.
        facts |= {"selector_rank": selector_rank, "selector_top_k": selector_top_k}
        facts |= {"conv_kernel_size": 1, "conv_group_size": hidden}
    return Qwen3Config(
        architectures=["DFlash2DraftModel" if selector_rank else "DFlashDraftModel"],
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        hidden_act="silu",
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(rope.get("rope_theta") or _DEFAULT_ROPE_THETA),
        },
        attention_bias=False,
        tie_word_embeddings=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        dtype="bfloat16",
        num_target_layers=config.num_hidden_layers,
        block_size=block_size,
        dflash_config=facts,
    )


def new_drafter(
    target: PreTrainedModel,
    shape: DrafterShape,
    layer_ids: list[int],
    mask_token_id: int,
    seed: int,
) -> tuple[DFlashNetwork, Qwen3Config, str]:
    """A network in bfloat16, its config, and a sentence about what it starts from."""
    config = drafter_config(
        target,
        layers=shape.layers,
        block_size=shape.block_length,
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        selector_rank=shape.selector_rank,
        selector_top_k=min(shape.selector_top_k, text_config(target.config).vocab_size),
    )
    if shape.autoregressive:
        config.is_causal = True
    kind = FusedInputNetwork if shape.fused_input else DFlashNetwork
    torch.manual_seed(seed)
    network = kind(DrafterConfig.from_qwen3(config))
    depth = text_config(target.config).num_hidden_layers
    sources = shape.copied_layers
    if sources is None:
        sources = tuple(range(max(0, depth - shape.layers), depth))
    start = "random weights"
    if len(sources) == shape.layers:
        try:
            warm_start(network, target, list(sources), len(layer_ids) - 1)
            start = f"the target's layers {', '.join(map(str, sources))}"
        except (AttributeError, ValueError, RuntimeError):
            if shape.copied_layers is not None:
                raise
            # Layers of another make: the drafter's are initialized like any Qwen3's.
            torch.manual_seed(seed)
            network = kind(DrafterConfig.from_qwen3(config))
    start_selector(network, target.get_input_embeddings().weight)
    return network.bfloat16(), config, start


def target_head(target: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> TargetHead:
    """The target's embedding and head, frozen."""
    softcap: Any = getattr(text_config(target.config), "final_logit_softcapping", None)
    return TargetHead(
        target.get_input_embeddings().weight.detach().to(dtype),
        target.get_output_embeddings().weight.detach().to(dtype),
        float(softcap) if softcap else None,
    )
