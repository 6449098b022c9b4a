"""What the target answers to the items of a step: tokens from logits, and which drafts hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashduet.sampling.choose import BadLogits, RowBlock, choose_blocks
from flashduet.sampling.logprobs import row_logprobs
from flashduet.sampling.position_logprobs import PositionLogprobs
from target_service.layout import Part
from target_service.session import PrefillChunk, StepFailure, WorkItem


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens that an item commits: accepted drafts and the bonus, or a prefill's first."""

    committed: tuple[int, ...]
    accepted: int


def choose(logits: Tensor, parts: Sequence[Part]) -> list[Answer | StepFailure]:
    """Choose for all rows of the step in one call; items with bad logits fail alone."""
    failures = _unsound_chunks(logits, parts)
    while True:
        sound = [i for i, part in enumerate(parts) if part.chooses and i not in failures]
        rows = [row for i in sound for row in parts[i].logit_rows]
        chosen: list[list[int]] = []
        try:
            if rows:
                wanted = _take_rows(logits, rows)
                chosen = choose_blocks(wanted, [_row_block(parts[i]) for i in sound])
            break
        except BadLogits as error:
            bad = {rows[row] for row in error.rows}
            for i in sound:
                if not bad.isdisjoint(parts[i].logit_rows):
                    failures[i] = StepFailure(error)
    tokens = dict(zip(sound, chosen, strict=True))
    return [
        failures.get(i) or _accept(part.item, tokens.get(i, [])) for i, part in enumerate(parts)
    ]


def _unsound_chunks(logits: Tensor, parts: Sequence[Part]) -> dict[int, StepFailure]:
    """Inner chunks whose last row is no distribution; none may be built on."""
    inner = [i for i, part in enumerate(parts) if not part.chooses]
    if not inner:
        return {}
    largest = _take_rows(logits, [parts[i].first_kept for i in inner]).amax(dim=-1)
    sound = torch.isfinite(largest).tolist()
    return {
        i: StepFailure(BadLogits((0,))) for i, good in zip(inner, sound, strict=True) if not good
    }


def _take_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _row_block(part: Part) -> RowBlock:
    item, session = part.item, part.item.session
    drafts = () if isinstance(item, PrefillChunk) else item.token_ids
    first = part.span.end - part.kept + 1
    return RowBlock(
        first, part.kept, session.sampling, session.choice, session.history, drafts=drafts
    )


def _accept(item: WorkItem, chosen: list[int]) -> Answer:
    if isinstance(item, PrefillChunk):
        return Answer(tuple(chosen), 0)
    # Row i chose the token that follows row i's; drafts hold as far as both agree.
    drafts, accepted = item.token_ids, 0
    while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
        accepted += 1
    return Answer(tuple(chosen[: accepted + 1]), accepted)


def tell_logprobs(
    logits: Tensor, parts: Sequence[Part], answers: Sequence[Answer | StepFailure]
) -> list[tuple[PositionLogprobs, ...]]:
    """Logprobs of the committed tokens of each item whose session asks for them."""
    rows: list[int] = []
    token_ids: list[int] = []
    top: list[int] = []
    counts = []
    for part, answer in zip(parts, answers, strict=True):
        wanted = part.item.session.top_logprobs
        count = 0
        if wanted is not None and isinstance(answer, Answer):
            count = len(answer.committed)
            rows += part.logit_rows[:count]
            token_ids += answer.committed
            top += [wanted] * count
        counts.append(count)
    told = iter(row_logprobs(logits, rows, token_ids, top) if rows else ())
    return [tuple(next(told) for _ in range(count)) for count in counts]
