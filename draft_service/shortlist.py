"""The draft vocabulary: a file beside a checkpoint that limits its head to frequent tokens.

A head over all tokens can cost more than the rest of a small drafter, and rare tokens are rarely
drafted right anyway (the idea of FR-Spec, arXiv 2502.14856). `draft_vocabulary.safetensors` holds
one tensor, `token_ids`, int64 [k], ascending. Readers that do not know it draft from all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from flashduet.errors import CheckpointError
from flashduet.models_cache import put_in_place

FILE = "draft_vocabulary.safetensors"
_TENSOR = "token_ids"


def build_shortlist(
    counts: Sequence[int] | Tensor, size: int, always: Iterable[int] = ()
) -> Tensor:
    """The tokens worth drafting.

    Args:
        counts: [V], how often each token was seen in what the target says.
        size: tokens wanted.
        always: tokens that are in it whatever their counts, such as those that end an answer.

    Returns:
        int64 [min(size, V)], ascending: first `always`, then the most frequent (of equally frequent
        ones the lowest id).

    Raises:
        ValueError: `size` has no room for `always`, or one of these is no token.
    """
    ranks = torch.as_tensor(counts).to(torch.float64)
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64)
    size = min(size, len(ranks))
    if len(kept) > size or size < 1:
        raise ValueError(f"a shortlist of {size} tokens has no room for {len(kept)} of them")
    if len(kept) and not 0 <= int(kept[0]) <= int(kept[-1]) < len(ranks):
        raise ValueError(f"token ids must be from 0 to {len(ranks) - 1}: {kept.tolist()}")
    ranks[kept] = torch.inf
    return ranks.argsort(descending=True, stable=True)[:size].sort().values


def write_shortlist(folder: Path, token_ids: Tensor) -> None:
    """Put it beside a checkpoint."""
    staged = folder / f"{FILE}.tmp"
    staged.write_bytes(save({_TENSOR: token_ids.to(torch.int64).contiguous()}))
    put_in_place(staged, folder / FILE)


def read_shortlist(folder: Path, vocab_size: int) -> Tensor | None:
    """A checkpoint's shortlist, int64 [k], or None where there is none.

    Raises:
        CheckpointError: the file is damaged, or does not hold ascending ids below `vocab_size`.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    shown = f"{folder.name}/{FILE}"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{shown}: expected a whole safetensors file: {error}") from error
    ids = tensors.get(_TENSOR)
    if ids is None or set(tensors) != {_TENSOR}:
        raise CheckpointError(f"{shown}: expected the tensor {_TENSOR}, found {sorted(tensors)}")
    if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
        raise CheckpointError(
            f"{shown}: {_TENSOR}: expected int64 [k], found {ids.dtype} {list(ids.shape)}"
        )
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise CheckpointError(f"{shown}: {_TENSOR}: expected ascending ids below {vocab_size}")
    return ids
