"""DFlash 2's candidate selector: a walk over the slots that makes the drafts fit one another.

Slots are predicted side by side and know nothing of each other's tokens. From each slot's best
candidates c with logits u the walk takes the best

    u[c] + sum over r of predecessor[previous token, r] * projected[slot, r] * successor[c, r]

and goes on from it; the token before the first slot is the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be drafted in n slots, block after block.

    Attributes:
        ids: int64 [n, k] token ids, ascending in each row, so that ties go to the lowest.
        logits: float32 [n, k].
        temperatures: float32 [n], 1 where the choice is greedy.
        noise: float32 [n, k], what position-keyed sampling adds to logits / temperature; 0 where
            the choice is greedy.
    """

    ids: Tensor
    logits: Tensor
    temperatures: Tensor
    noise: Tensor


class CandidateSelector(nn.Module):
    """Codebooks [vocabulary, rank] of tokens as predecessors and as successors."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def pair_logits(self, hidden: Tensor, previous: Tensor, ids: Tensor | None) -> Tensor:
        """What the walk adds to the logits of each slot, float32 [n, k].

        Args:
            hidden: [n, H] after the final norm.
            previous: int64 [n], the token before each slot.
            ids: int64 [k], the tokens of the columns; None: the whole vocabulary.
        """
        before = functional.embedding(previous, self.predecessor_codebook)
        successors: Tensor = self.successor_codebook
        if ids is not None:
            successors = functional.embedding(ids, successors)
        return functional.linear(before * self.hidden_projection(hidden), successors).float()

    def walk(
        self, hidden: Tensor, candidates: Candidates, anchors: Sequence[int], rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 [n] and their probabilities among their candidates float32 [n].

        Args:
            hidden: [n, H] after the final norm.
            anchors: one a block.
            rows: slots of each block, in order; together n.
        """
        projected = self.hidden_projection(hidden)
        tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        confidence = torch.empty(len(hidden), device=hidden.device)
        counts = torch.tensor(rows, device=hidden.device)
        starts = counts.cumsum(0) - counts
        previous = torch.tensor(anchors, device=hidden.device)
        for slot in range(max(rows)):
            going = counts > slot
            at = starts[going] + slot
            query = self.predecessor_codebook[previous[going]] * projected[at]
            successors = self.successor_codebook[candidates.ids[at]]
            pairs = torch.einsum("br,bkr->bk", query, successors).float()
            scores = (candidates.logits[at] + pairs) / candidates.temperatures[at, None]
            best = (scores + candidates.noise[at]).argmax(-1, keepdim=True)
            tokens[at] = candidates.ids[at].gather(-1, best)[:, 0]
            confidence[at] = scores.softmax(-1).gather(-1, best)[:, 0]
            previous[going] = tokens[at]
        return tokens, confidence
