"""What goes into the drafter and comes out of it as tokens: embedding, head, and their ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from draft_service.joined_linear import Product
from draft_service.own_vocabulary import OwnVocabulary
from draft_service.target_tensors import TargetTensors
from flashduet.packed_linear import PackedLinear, can_pack


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """On one device, in one floating type.

    Attributes:
        embedding: [V, H].
        head: [k, H]; the embedding itself where tied and whole.
        head_bias: [k] or None.
        head_ids: int64 [k], ascending: the token of each row of the head; None: row i is token i.
        mask_embedding: [H], input of the slots to be denoised; None: the mask token's row.
    """

    embedding: Tensor
    head: Tensor
    head_bias: Tensor | None = None
    head_ids: Tensor | None = None
    mask_embedding: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.embedding.shape[0]

    def product(self) -> Product:
        """The head [n, H] → [n, k], packed where the processor has kernels for it."""
        if can_pack(self.head.dtype, self.head.device):
            return PackedLinear([self.head], [self.head_bias])
        return lambda hidden: functional.linear(hidden, self.head, self.head_bias)

    @property
    def nbytes(self) -> int:
        """Memory of embedding and head as they serve; a packed head is a copy of its own."""
        packed = can_pack(self.head.dtype, self.head.device)
        shared = self.head is self.embedding and not packed
        return self.embedding.nbytes + (0 if shared else self.head.nbytes)


def assemble(
    target: TargetTensors, own: OwnVocabulary | None = None, shortlist: Tensor | None = None
) -> DraftVocabulary:
    """The checkpoint's own where it has them, the target's otherwise, cut to the shortlist.

    Args:
        shortlist: int64 [k], ascending; None: no cut. Tokens that the head lacks are left out.
    """
    own = own or OwnVocabulary()
    like = target.embedding

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(device=like.device, dtype=like.dtype)

    embedding = like if own.embedding is None else placed(own.embedding)
    head, bias, ids = target.head, target.head_bias, None
    if own.head is not None:
        head, bias, ids = placed(own.head), None, own.head_ids
    if shortlist is not None:
        if ids is None:
            rows = shortlist[shortlist < head.shape[0]]
            ids = rows
        else:
            rows = torch.isin(ids, shortlist).nonzero()[:, 0]
            ids = ids[rows]
        rows = rows.to(like.device)
        head, bias = head[rows], None if bias is None else bias[rows]
    ids = None if ids is None else ids.to(like.device)
    mask = None if own.mask_embedding is None else placed(own.mask_embedding)
    return DraftVocabulary(embedding, head, bias, ids, mask)
