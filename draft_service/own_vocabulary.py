"""What some checkpoints bring of their own where DFlash borrows from the target.

An embedding, a head (over all tokens, or over a part that `d2t` or `t2d` name), or an embedding of
the mask token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.config import DrafterConfig
from draft_service.stored_tensors import StoredTensors
from flashduet.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class OwnVocabulary:
    """Each None where the target's serves.

    Attributes:
        embedding: [V, H].
        head: [k, H].
        head_ids: int64 [k], ascending: the token of each row of the head; None: row i is token i.
        mask_embedding: [H], input of the slots to be denoised.
    """

    embedding: Tensor | None = None
    head: Tensor | None = None
    head_ids: Tensor | None = None
    mask_embedding: Tensor | None = None

    @property
    def empty(self) -> bool:
        return self.embedding is None and self.head is None and self.mask_embedding is None


def read_own_vocabulary(stored: StoredTensors, config: DrafterConfig) -> OwnVocabulary:
    """Read them from a checkpoint.

    Raises:
        CheckpointError: one of them has another shape than the configuration says, or the two maps
            between vocabularies contradict each other.
    """
    vocabulary, hidden = config.vocab_size, config.hidden_size
    names = ("embed_tokens.weight", "lm_head.weight")
    embedding = _matrix(stored, names[0], (vocabulary, hidden))
    ids = _head_ids(stored, config)
    rows = vocabulary if ids is None else len(ids)
    head = _matrix(stored, names[1], (rows, hidden))
    if head is None and ids is not None:
        raise CheckpointError(
            f"{stored.shown(names[1])}: expected a head of {rows} rows for the draft vocabulary, "
            "found none"
        )
    mask = stored.optional("mask_embedding", "mask_embedding.weight")
    if mask is not None and mask.numel() != hidden:
        raise CheckpointError(
            f"{stored.shown('mask_embedding')}: expected {hidden} numbers, found {mask.numel()}"
        )
    if head is not None and ids is not None and not bool((ids.diff() > 0).all()):
        ids, order = ids.sort()
        head = head[order]
    return OwnVocabulary(embedding, head, ids, None if mask is None else mask.view(hidden))


def _head_ids(stored: StoredTensors, config: DrafterConfig) -> Tensor | None:
    """Token ids of the head's rows, in the head's order; None where the head covers all tokens."""
    offsets, kept = stored.optional("d2t"), stored.optional("t2d")
    rows = config.draft_vocab_size
    ids = None if offsets is None else torch.arange(len(offsets)) + offsets.to(torch.int64)
    if kept is not None:
        if kept.shape != (config.vocab_size,):
            raise CheckpointError(
                f"{stored.shown('t2d')}: expected shape [{config.vocab_size}], found "
                f"{list(kept.shape)}"
            )
        told = kept.nonzero()[:, 0]
        if ids is not None and not torch.equal(ids.sort().values, told):
            raise CheckpointError(
                f"{stored.shown('d2t')}: expected the {len(told)} tokens that t2d keeps, found "
                f"{len(ids)} others"
            )
        ids = told if ids is None else ids
    if ids is None:
        if rows is not None and rows != config.vocab_size:
            raise CheckpointError(
                f"{stored.shown('d2t')}: expected this map of a draft vocabulary of {rows} to the "
                f"target's of {config.vocab_size}, found none"
            )
        return None
    if rows is not None and rows != len(ids):
        raise CheckpointError(f"{stored.shown('d2t')}: expected {rows} rows, found {len(ids)}")
    fits = not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size)
    if not fits or len(ids.unique()) < max(1, len(ids)):
        raise CheckpointError(
            f"{stored.shown('d2t')}: expected different token ids below {config.vocab_size}, found "
            f"{ids.tolist()[:8]}..."
        )
    return None if torch.equal(ids, torch.arange(config.vocab_size)) else ids


def _matrix(stored: StoredTensors, name: str, shape: tuple[int, int]) -> Tensor | None:
    return None if stored.find(name) is None else stored.read(name, shape)
