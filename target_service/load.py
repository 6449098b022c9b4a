"""The target's weights: found, checked, and put on their device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from flashduet import models
from flashduet.errors import CheckpointError
from flashduet.hardware import choose_device, choose_dtype, stored_dtype
from flashduet.packed_linear import can_pack, products
from flashduet.transport.tensors import DATA_TYPES
from flashduet.v1 import common_pb2
from target_service.settings import TargetSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A model ready to run, with what the rest of the service asks about it."""

    # Of the checkpoint.
    folder: Path
    model: nn.Module
    # Of the decoder itself, also where the checkpoint is multimodal.
    config: Any
    facts: common_pb2.ModelFacts
    device: torch.device
    dtype: torch.dtype

    @property
    def decoder(self) -> nn.Module:
        """The model without its head."""
        return self.model.get_decoder()  # type: ignore[operator,no-any-return]

    @property
    def weight_bytes(self) -> int:
        """Of the weights as they are served: a packed head is a copy of an embedding it is tied
        to, all other packed weights take the place of the loaded ones."""
        held = sum(part.nbytes for part in self.model.parameters())
        held += sum(product.nbytes for product in products(self.model))
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
        if tied and can_pack(self.dtype, self.device):
            held += head.weight.nbytes
        return held

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in all layers, layers alike."""
        text = self.config
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * text.num_hidden_layers * heads * size * self.dtype.itemsize


class _StageLog:
    """Says what a long start is at, once a stage."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._last:
            log.info("model: %s", stage)
        self._last = stage


def load_target(settings: TargetSettings) -> LoadedTarget:
    """Load the checkpoint that the settings name; takes seconds to minutes.

    Raises:
        ConfigurationError: a model, device or dtype that cannot be had; names the fix.
        CheckpointError: names the file, the tensor, what was expected and what was found.
    """
    disable_progress_bar()  # a log has no place for one
    device = choose_device(settings.device, "FLASHDUET_TARGET_DEVICE")
    folder = models.resolve_model(settings.model, progress=_StageLog())
    config = models.load_config(folder)
    models.check_target_supported(config)
    check_weight_files(folder)
    text = models.text_config(config)
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    dtype = choose_dtype(settings.dtype, stored_dtype(stored))
    model = _load(folder, dtype).to(device).eval()
    name = settings.name or models.served_name(settings.model)
    facts = models.model_facts(folder, name, DATA_TYPES[dtype])
    if settings.context_window is not None:
        facts.context_window = min(facts.context_window, settings.context_window)
    return LoadedTarget(folder, model, models.text_config(model.config), facts, device, dtype)


def check_weight_files(folder: Path) -> None:
    """Refuse a folder without safetensors, or with one that is cut short.

    Raises:
        CheckpointError: names the file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: *.safetensors expected, none found; convert the checkpoint, "
            "pickled weights are never opened"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: truncated or not a safetensors file: {error}"
            ) from error


def _load(folder: Path, dtype: torch.dtype) -> nn.Module:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            # Reported below with names and shapes, instead of a long trace.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: not loadable as a causal language model: {error}") from (
            error
        )
    problems = [f"{name}: expected in the checkpoint, not found" for name in info["missing_keys"]]
    problems += [
        f"{name}: shape {list(expected)} expected, found {list(found)}"
        for name, found, expected in info["mismatched_keys"]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{folder}: {'; '.join(sorted(problems)[:3])}{more}")
    return model  # type: ignore[no-any-return]
