"""From a drafter's last states to its drafts, with what a selector (DFlash 2) makes of them."""

from __future__ import annotations

import torch

from draft_service.network import DFlashNetwork
from draft_service.selector import Candidates

_ROWS = 256
"""Rows of the whole vocabulary's logits held at once."""


def draft_logits(
    network: DFlashNetwork,
    hidden: torch.Tensor,
    previous: torch.Tensor,
    head: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of slots whose previous tokens are known, float32 [n, k].

    A slot is reached only if the drafts before it are right, so the true tokens before it are those
    that a walk would have taken. (A walk looks only at each slot's best few.)

    Args:
        hidden: [n, H] after the final norm. previous: int64 [n]. head: [k, H], the target's rows.
        ids: int64 [k], the tokens of those rows; None: all.
    """
    logits = network.logits(hidden, head)
    selector = network.candidate_selector
    return logits if selector is None else logits + selector.pair_logits(hidden, previous, ids)


@torch.no_grad()
def greedy_drafts(
    network: DFlashNetwork,
    hidden: torch.Tensor,
    anchors: list[int],
    rows: list[int],
    head: torch.Tensor,
    shortlist: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the draft service drafts greedily, int64 [n] on the CPU.

    Args:
        hidden: [n, H] after the final norm, block after block. anchors: the tokens before them.
        rows: slots of each block, together n. head: [V, H], the target's.
        shortlist: int64 [k], the only tokens drafted; None: all.
    """
    if shortlist is not None:
        head = head[shortlist]
    selector = network.candidate_selector
    if selector is None:
        # Ties go to the lowest id, of which `topk` makes no promise.
        winners = [network.logits(part, head).argmax(-1).cpu() for part in hidden.split(_ROWS)]
        columns = torch.cat(winners)
        return columns if shortlist is None else shortlist[columns]
    most = min(selector.top_k, len(head))
    best = [network.logits(part, head).topk(most) for part in hidden.split(_ROWS)]
    columns = torch.cat([each.indices for each in best])
    ids = columns if shortlist is None else shortlist.to(columns.device)[columns]
    order = ids.argsort(-1)
    logits = torch.cat([each.values for each in best]).gather(-1, order)
    plain = torch.ones(len(hidden), device=hidden.device)
    candidates = Candidates(ids.gather(-1, order), logits, plain, torch.zeros_like(logits))
    tokens, _ = selector.walk(hidden, candidates, anchors, rows)
    return tokens.cpu()
