"""The target as training sees it: a frozen Hugging Face model, its tokenizer, its fingerprint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from flashduet.errors import CheckpointError
from flashduet.models import resolve_model

_FINGERPRINTED = ("*.safetensors", "tokenizer.json", "chat_template.jinja")


def target_folder(reference: str) -> Path:
    """The local folder of any target that the services take."""
    return resolve_model(reference)


def load_target(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The frozen model, in evaluation mode."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The target's tokenizer; training needs its chat template and its end token.

    Raises:
        CheckpointError: one of the two is missing.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise CheckpointError(f"{folder}: the tokenizer has no chat template to make prompts with")
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"{folder}: the tokenizer names no eos_token")
    return tokenizer


def target_hash(folder: Path) -> str:
    """SHA-256 over what decides the target's answers: weights, tokenizer, chat template."""
    digest = hashlib.sha256()
    for pattern in _FINGERPRINTED:
        for path in sorted(folder.glob(pattern)):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()
