"""Logits over a part of the vocabulary: whose columns they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashduet.sampling.noise import GROUP


class Shortlist:
    """The token ids that a head over a part of the vocabulary has rows for.

    Args:
        token_ids: int64 [k], ascending, below `vocabulary`.
        vocabulary: of the whole model.

    Attributes:
        columns: k.
        group_starts: int64 [groups + 1] on the CPU, where the ids of each group begin.
    """

    def __init__(self, token_ids: Tensor, vocabulary: int) -> None:
        self.token_ids = token_ids
        self.on_cpu = token_ids.cpu().contiguous()
        self.columns = len(token_ids)
        self.vocabulary = vocabulary
        groups = -(-vocabulary // GROUP)
        starts = np.searchsorted(self.on_cpu.numpy(), np.arange(groups + 1) * GROUP)
        self.group_starts = torch.from_numpy(starts)
        self._id_list: list[int] = token_ids.tolist()

    def expanded(self, logits: Tensor) -> Tensor:
        """[n, k] to [n, vocabulary], -inf where there is no column."""
        whole = logits.new_full((len(logits), self.vocabulary), -torch.inf)
        whole[:, self.token_ids] = logits
        return whole

    def ids_of(self, columns: list[int]) -> list[int]:
        """Token ids of some columns."""
        return [self._id_list[column] for column in columns]
