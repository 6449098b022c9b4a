"""What is trained: many blocks of one sequence denoised in one packed pass (arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from draft_service.masks import attention_masks
from draft_service.network import DFlashNetwork
from drafter_training.dataset import Batch


@dataclass(frozen=True)
class ObjectiveSettings:
    """gamma: decay of the slot weights; distillation: share of the target's own distribution.

    The softmax runs over ``common_tokens`` frequent tokens, the batch's labels and
    ``random_tokens`` others, for a whole vocabulary would cost more than the network.
    """

    gamma: float = 2.5
    distillation: float = 0.5
    anchors: int = 32
    common_tokens: int = 4096
    random_tokens: int = 512


@dataclass(frozen=True)
class Blocks:
    """Packed blocks of a batch. A anchors a sequence, B slots a block.

    anchors: int64 [N, A] positions of the last committed token. valid: bool [N, A].
    tokens, positions: int64 [N, A, B]; slot 0 of tokens is the anchor, the rest masks.
    labels: int64 [N, A, B - 1], -1 where the sequence has ended or the anchor is padding.
    """

    anchors: torch.Tensor
    valid: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


def sample_blocks(
    batch: Batch, *, count: int, block_length: int, mask_token_id: int, generator: torch.Generator
) -> Blocks:
    """Draws up to ``count`` random anchors inside each answer, without replacement.

    Padding anchors carry the distinct positions that were drawn past the answer's own: a block is
    told from another by its anchor.
    """
    length = batch.tokens.shape[1]
    place = torch.arange(length)
    allowed = (place >= batch.prompt_lengths[:, None]) & (place < batch.lengths[:, None] - 1)
    score = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1)
    score, anchors = score.topk(min(count, int(allowed.sum(1).max())))
    valid = score >= 0
    positions = anchors[..., None] + torch.arange(block_length)
    inside = (positions < batch.lengths[:, None, None]) & valid[..., None]
    truth = batch.tokens.gather(1, positions.clamp_max(length - 1).flatten(1)).view_as(positions)
    tokens = torch.full_like(truth, mask_token_id)
    tokens[..., 0] = truth[..., 0]
    labels = truth.masked_fill(~inside, -1)[..., 1:]
    return Blocks(anchors, valid, tokens, positions, labels)


def denoise(
    network: DFlashNetwork, features: torch.Tensor, embedding: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    """One packed pass over the blocks of each sequence.

    A block sees the context strictly before its anchor, and itself; the mask is the draft
    service's, so that training and serving cannot differ.

    Args:
        features: [N, C, n H] of positions 0..C-1; rows at or past every anchor are never seen.
        embedding: the target's, [V, H].

    Returns:
        [N, A, B, H], after the drafter's final norm.
    """
    positions = blocks.positions.flatten(1)
    places = torch.arange(features.shape[1]).expand(len(features), -1)
    anchors = blocks.anchors.repeat_interleave(blocks.positions.shape[-1], 1)
    hidden = network(
        network.embed(blocks.tokens.flatten(1), embedding),
        positions,
        network.context_kv(network.context_states(features), places),
        attention_masks(network.config.layer_masks, positions, places, anchors),
    )
    return hidden.view(*blocks.positions.shape, -1)


class Objective:
    """Weighs slot k of a block by exp(-(k - 1) / gamma): an early miss costs all after it."""

    def __init__(
        self,
        embedding: torch.Tensor,
        head: torch.Tensor,
        token_counts: torch.Tensor,
        settings: ObjectiveSettings,
    ) -> None:
        """embedding, head: the target's, frozen, [V, H]; token_counts: int64 [V] in the answers."""
        self.embedding, self.head, self.settings = embedding, head, settings
        self.common = token_counts.topk(min(settings.common_tokens, len(token_counts))).indices

    def __call__(
        self, network: DFlashNetwork, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss and the mean acceptance length of the blocks, both scalars."""
        blocks = sample_blocks(
            batch,
            count=self.settings.anchors,
            block_length=network.config.block_length,
            mask_token_id=network.config.mask_token_id,
            generator=generator,
        )
        features = batch.features[:, : int(blocks.anchors.max())].to(self.embedding.dtype)
        hidden = denoise(network, features, self.embedding, blocks)
        return self._loss(hidden[:, :, 1:], blocks, batch, generator)

    def _loss(
        self, hidden: torch.Tensor, blocks: Blocks, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        known = blocks.labels >= 0
        labels = blocks.labels[known]
        vocabulary = self._vocabulary(labels, generator)
        head = self.head[vocabulary]
        logits = F.linear(hidden[known].to(head.dtype), head).float()
        answers = torch.searchsorted(vocabulary, labels)
        log_probs = logits.log_softmax(-1)
        loss = -log_probs.gather(1, answers[:, None])[:, 0]
        if self.settings.distillation:
            # The state at position p - 1 gives the target's distribution of the token at p.
            source = (blocks.positions[..., 1:] - 1).clamp_max(batch.tokens.shape[1] - 1)
            rows = torch.arange(len(source))[:, None, None].expand_as(source)
            with torch.no_grad():
                states = batch.final_states[rows[known], source[known]]
                teacher = F.linear(states.to(head.dtype), head).float().softmax(-1)
            soft = -(teacher * log_probs).sum(-1)
            loss = loss + self.settings.distillation * (soft - loss)
        slots = torch.arange(known.shape[-1]).expand_as(known)[known]
        weights = torch.exp(-slots / self.settings.gamma)
        right = torch.zeros(known.shape)
        right[known] = (logits.argmax(-1) == answers).float()
        tau = 1 + right.cumprod(-1).sum(-1)[blocks.valid].mean()
        return (weights * loss).sum() / weights.sum(), tau

    def _vocabulary(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Sorted distinct ids, int64."""
        settings = self.settings
        others = torch.randint(len(self.head), (settings.random_tokens,), generator=generator)
        return torch.cat([self.common, labels, others]).unique()
