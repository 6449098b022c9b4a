"""The two tensors that a drafter borrows from its target's checkpoint: embedding and head.

Nothing else of the target is read, so that a draft service needs no room for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.tensor_files import TensorFiles
from flashduet import models
from flashduet.errors import CheckpointError

# Last parts of the names that families give to the two, most common first.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
# Parts of multimodal or multi-token-prediction models that have embeddings and heads of their own.
_FOREIGN = ("vision", "audio", "visual", "mtp", "layers.", "talker", "encoder.")


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """Embedding [V, H], head [V', H] (the embedding itself where tied), head bias [V'] or None.

    V and V' may be padded past the tokenizer's size.
    """

    embedding: Tensor
    head: Tensor
    head_bias: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]


def ties_head(config: Any) -> bool:
    """Whether a target's config says that its embedding serves as its head."""
    return any(
        getattr(each, "tie_word_embeddings", False) for each in (config, models.text_config(config))
    )


def load_target_tensors(
    folder: Path,
    *,
    tied: bool,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> TargetTensors:
    """Read embedding and head from the target's safetensors files.

    Args:
        folder: the target's checkpoint.
        tied: its config's `tie_word_embeddings`: without a head of its own in the files, the
            embedding serves. A head that is in the files wins, as in Transformers.
        dtype: None: as stored.

    Raises:
        CheckpointError: one of them is missing, ambiguous, or does not fit the other.
    """
    files = TensorFiles(folder)
    embedding_name = _only(files, _EMBEDDINGS)
    if embedding_name is None:
        raise CheckpointError(
            f"{folder.name}: expected the target's input embedding ({', '.join(_EMBEDDINGS)}), "
            f"found none among {len(files.names)} tensors"
        )
    stored = files.read(embedding_name)
    if stored.dim() != 2:
        raise CheckpointError(
            f"{files.shown(embedding_name)}: expected shape [vocabulary, hidden], found "
            f"{list(stored.shape)}"
        )
    embedding = stored.to(device=device, dtype=dtype)
    head_name = _only(files, _HEADS)
    if head_name is None:
        if not tied:
            raise CheckpointError(
                f"{folder.name}: expected the target's head ({', '.join(_HEADS)}), found none, and "
                "tie_word_embeddings is false"
            )
        return TargetTensors(embedding, embedding)
    head = files.read(head_name)
    if head.dim() != 2 or head.shape[1] != embedding.shape[1]:
        raise CheckpointError(
            f"{files.shown(head_name)}: expected shape [vocabulary, {embedding.shape[1]}], found "
            f"{list(head.shape)}"
        )
    if head.shape == stored.shape and torch.equal(head, stored):
        return TargetTensors(embedding, embedding)  # a tied head that was written out
    bias_name = head_name.removesuffix("weight") + "bias"
    bias = files.read(bias_name, (head.shape[0],)) if bias_name in files else None
    return TargetTensors(
        embedding,
        head.to(device=device, dtype=dtype),
        None if bias is None else bias.to(device=device, dtype=dtype),
    )


def _only(files: TensorFiles, endings: tuple[str, ...]) -> str | None:
    """The one tensor whose name is, or ends in, one of `endings`."""
    for ending in endings:
        found = [
            name
            for name in files.names
            if (name == ending or name.endswith("." + ending))
            and not any(part in name for part in _FOREIGN)
        ]
        if len(found) > 1:
            raise CheckpointError(
                f"{files.shown(found[0])}: expected one tensor named ...{ending}, found "
                f"{', '.join(found)}"
            )
        if found:
            return found[0]
    return None
