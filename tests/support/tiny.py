"""Random tiny models with real Hugging Face layouts: correctness without the weights' size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
EOS, IM_START, IM_END, MASK = range(4)
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% if mood is defined %}{{ mood }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": EOS,
    "eos_token_id": IM_END,
    "pad_token_id": EOS,
}

# What a family's config needs besides the common keys.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": 24},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "attention_chunk_size": 32,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        # The next multiple of four layers is without rope, and looks at everything.
        "no_rope_layer_interval": 4,
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt_neox": {"model_type": "gpt_neox"},
    # Of another time: it makes its attention itself, with a bias by distance.
    "bloom": {"model_type": "bloom"},
}


def tiny_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level tokenizer: 4 special tokens, 256 bytes, and a few merged pairs."""
    byte_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIALS + byte_alphabet)}
    merges: list[tuple[str, str]] = []
    for left, right in zip("thaneriosl", "haneriosle", strict=True):
        if left + right not in vocab and len(vocab) < vocab_size:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    for index in range(len(vocab), vocab_size):
        vocab[f"<|extra_{index}|>"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[EOS],
        eos_token=SPECIALS[IM_END],
        pad_token=SPECIALS[EOS],
        additional_special_tokens=[SPECIALS[IM_START], SPECIALS[MASK]],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def tiny_target(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random target of `family` with a tokenizer; returns `folder`.

    Weights are scaled up so that the logits differ clearly from token to token: greedy answers of
    an untouched random model repeat one token, which would hide mistakes.
    """
    settings = {**_COMMON, **_FAMILIES[family], **overrides}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                spread = 1.0 if "embed" in name or "wte" in name else 4.0
                weight.mul_(spread * 3.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = settings["eos_token_id"]
    model.save_pretrained(folder)
    tiny_tokenizer(folder, settings["vocab_size"])
    return folder


def tiny_drafter(
    folder: Path,
    target: Path,
    *,
    layers: int = 2,
    block_size: int = 8,
    seed: int = 1,
    dflash: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a z-lab DFlash checkpoint with random weights that fits `target`; returns `folder`.

    `dflash` is merged into `dflash_config`, `overrides` into the top level of config.json.
    """
    facts = AutoConfig.from_pretrained(target)
    hidden, head_dim, heads, kv_heads = facts.hidden_size, 16, 4, 2
    depth = facts.num_hidden_layers
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, depth // 2, depth - 2]}
    nested |= dflash or {}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": facts.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "num_target_layers": depth,
        "block_size": block_size,
        "dflash_config": nested,
        "dtype": "float32",
    }
    config |= overrides
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, inner = config["head_dim"], config["intermediate_size"]
    features = len(nested["target_layer_ids"]) * hidden
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (2.0 / shape[-1] ** 0.5)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": weight(hidden, features),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": weight(heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            prefix + "self_attn.q_norm.weight": norm(head_dim),
            prefix + "self_attn.k_norm.weight": norm(head_dim),
            prefix + "mlp.gate_proj.weight": weight(inner, hidden),
            prefix + "mlp.up_proj.weight": weight(inner, hidden),
            prefix + "mlp.down_proj.weight": weight(hidden, inner),
            prefix + "input_layernorm.weight": norm(hidden),
            prefix + "post_attention_layernorm.weight": norm(hidden),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
