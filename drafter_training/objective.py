"""What is trained: many blocks of one sequence denoised in one packed pass (arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from draft_service.network import DFlashNetwork
from drafter_training.blocks import UNKNOWN, BlockRule, Blocks, sample_blocks
from drafter_training.dataset import Batch
from drafter_training.drafting import draft_logits
from drafter_training.loss import LossRule, slot_weights
from drafter_training.packing import denoise


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss, and over which tokens its softmax runs.

    ``common_tokens`` frequent tokens, the batch's labels and ``random_tokens`` others: the whole
    vocabulary costs more than the network on a CPU. ``common_tokens`` 0 is the whole vocabulary.
    """

    blocks: BlockRule
    loss: LossRule = field(default_factory=LossRule)
    common_tokens: int = 4096
    random_tokens: int = 512


@dataclass(frozen=True)
class Outcome:
    """Of one batch. loss: scalar. tau: mean acceptance length of its blocks, scalar."""

    loss: torch.Tensor
    tau: torch.Tensor


@dataclass(frozen=True)
class TargetHead:
    """What the drafter borrows, frozen: embedding and head [V, H], and the logits' softcap."""

    embedding: torch.Tensor
    head: torch.Tensor
    softcap: float | None = None

    def logits(self, states: torch.Tensor, head: torch.Tensor | None = None) -> torch.Tensor:
        """The target's own logits from its final states, float32; head: some of its rows."""
        weights = self.head if head is None else head
        logits = F.linear(states.to(weights.dtype), weights).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Objective(nn.Module):
    """Loss of a drafter on a batch. A module around the network, so that it can be replicated."""

    def __init__(
        self,
        network: DFlashNetwork,
        target: TargetHead,
        token_counts: torch.Tensor,
        settings: ObjectiveSettings,
    ) -> None:
        """token_counts: int64 [V] of the answers."""
        super().__init__()
        self.network, self.target, self.settings = network, target, settings
        count = settings.common_tokens or len(token_counts)
        self.common = token_counts.topk(min(count, len(token_counts))).indices

    def forward(
        self, batch: Batch, generator: torch.Generator, rule: BlockRule | None = None
    ) -> Outcome:
        """generator: on the CPU; decides anchors and random tokens. rule: None: the settings'."""
        blocks = sample_blocks(batch, rule or self.settings.blocks, generator)
        hidden = denoise(self.network, batch, self.target.embedding, blocks)
        if self.settings.blocks.given == "truth":
            return self._outcome(hidden[:, :, :-1], blocks, batch, generator)
        return self._outcome(hidden[:, :, 1:], blocks, batch, generator)

    def _outcome(
        self, hidden: torch.Tensor, blocks: Blocks, batch: Batch, generator: torch.Generator
    ) -> Outcome:
        device = hidden.device
        known = blocks.labels != UNKNOWN
        labels = blocks.labels[known]
        vocabulary = self._vocabulary(labels, generator)
        answers = torch.searchsorted(vocabulary, labels).to(device)
        head = self.target.head[vocabulary.to(device)]
        rows = hidden[known.to(device)].to(head.dtype)
        previous = blocks.previous[known].to(device)
        logits = draft_logits(self.network, rows, previous, head, vocabulary.to(device))
        log_probs = logits.log_softmax(-1)
        right_log_probs = log_probs.gather(1, answers[:, None])[:, 0]
        loss, share = -right_log_probs, self.settings.loss.distillation
        if share:
            with torch.no_grad():
                teacher = self.target.logits(self._teacher_states(blocks, known, batch), head)
            loss = (1 - share) * loss - share * (teacher.softmax(-1) * log_probs).sum(-1)
        known = known.to(device)
        spread = torch.zeros(known.shape, device=device)
        spread[known] = right_log_probs.detach()
        weights = slot_weights(self.settings.loss, spread, known)
        right = torch.zeros(known.shape, device=device)
        right[known] = (logits.argmax(-1) == answers).float()
        tau = 1 + right.cumprod(-1).sum(-1)[blocks.valid.to(device)].mean()
        return Outcome((weights[known] * loss).sum() / weights.sum(), tau)

    def _teacher_states(self, blocks: Blocks, known: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The state at position p - 1 gives the target's distribution of the token at p."""
        source = (blocks.positions[..., 1:] - 1).clamp_max(batch.tokens.shape[1] - 1)
        rows = torch.arange(len(source))[:, None, None].expand_as(source)
        return batch.final_states[rows[known], source[known]].to(self.target.head.device)

    def _vocabulary(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Sorted distinct ids, int64."""
        others = torch.randint(
            len(self.target.head), (self.settings.random_tokens,), generator=generator
        )
        return torch.cat([self.common, labels, others]).unique()
