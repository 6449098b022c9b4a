"""Drafts copied from the text itself: what followed when its last tokens came before.

Loops, quotations and edited code repeat what was said. A copy of it is right more often than a
small drafter's guess, past the first slots above all, and costs no pass (prompt lookup decoding;
what it brings is measured in docs/training.md). Like every draft, a copy is only a proposal.
"""

from __future__ import annotations

from array import array

import numpy as np

from draft_service.work import Drafts
from flashduet.settings import LONGEST_LOOKUP


def look_up(text: array[int], anchor: int, count: int, least: int) -> Drafts | None:
    """Drafts for the `count` positions after the anchor, or None if too little repeats.

    Of the places where most of the last tokens stood before, the latest is copied from. The copy
    may run into itself: a loop shorter than the block goes round.

    Args:
        text: int64 ("q"), the tokens before the anchor.
        least: tokens that must repeat, the anchor among them; from 1 to LONGEST_LOOKUP.

    Returns:
        Each token's confidence is what so many agreeing ones before it make likely, by Laplace's
        rule of succession: (n + 1) / (n + 2) after n.
    """
    ids = np.frombuffer(text, dtype=np.int64)
    ends = np.flatnonzero(ids == anchor)
    matched = 1 if len(ends) else 0
    while 0 < matched < min(LONGEST_LOOKUP, len(ids)):
        longer = ends[ends >= matched]
        longer = longer[ids[longer - matched] == ids[-matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if matched < least:
        return None
    start = int(ends[-1]) + 1
    source = [*text[start : start + count], anchor][:count]
    period = len(ids) + 1 - start
    while len(source) < count:
        source.append(source[len(source) - period])
    seen = range(matched, matched + count)
    return Drafts(source, [(n + 1) / (n + 2) for n in seen], copied=count)


def continued(text: array[int], anchor: int, drafts: Drafts, least: int) -> Drafts:
    """The drafter's own drafts up to where they lead into what was said before, then a copy of it.

    A drafter is at its best in the first slots: where it finds the way into a repetition, what
    followed there is right more often than its later slots.

    Args:
        drafts: of the drafter, for the positions after the anchor.
    """
    grown = text[:]
    grown.append(anchor)
    for kept, token in enumerate(drafts.token_ids[:-1], 1):
        copy = look_up(grown, token, len(drafts.token_ids) - kept, least)
        if copy is not None:
            return Drafts(
                drafts.token_ids[:kept] + copy.token_ids,
                drafts.confidence[:kept] + copy.confidence,
                copy.copied,
            )
        grown.append(token)
    return drafts
