"""Whether a position's logits have the same bits in passes of every make, tried out at start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from flashduet.errors import ConfigurationError
from flashduet.kv.storage import KVStorage
from target_service.batching import Span
from target_service.forward import PackedModel
from target_service.numerics import Invariance, find_row_multiple
from target_service.survey import vary

log = logging.getLogger(__name__)

# Past the first stretch of keys, where the memory allows it.
_TOKENS = 150
_TAIL = 20
_SEQUENCES = 3


def make_invariant(packed: PackedModel, kv: KVStorage, vocab_size: int) -> None:
    """Lay the model's passes out so that results do not depend on them.

    Uses the first blocks of the store, so it must run before any session does.

    Raises:
        ConfigurationError: no way of those tried is enough on this machine.
    """
    multiple = find_row_multiple(packed.model, kv.keys[0].dtype)
    if multiple is not None:
        for fold in (True, False):
            packed.invariance = Invariance(multiple, fold)
            if _results_agree(packed, kv, vocab_size):
                log.info(
                    "batch-invariant: rows in multiples of %d, those of a sequence attend %s",
                    multiple,
                    "together" if fold else "one by one",
                )
                return
    packed.invariance = None
    raise ConfigurationError(
        "FLASHDUET_TARGET_NUMERICS=batch_invariant cannot be had for this model in "
        f"{str(kv.keys[0].dtype).removeprefix('torch.')} on this machine: passes of other makes "
        "gave other bits; use fast"
    )


def _results_agree(packed: PackedModel, kv: KVStorage, vocab_size: int) -> bool:
    length = min(_TOKENS, kv.num_blocks // _SEQUENCES * kv.block_tokens)
    tail = min(_TAIL, length // 2)
    tokens = vary(_SEQUENCES * length, vocab_size)[0].tolist()
    blocks = kv.num_blocks // _SEQUENCES
    tables = [range(i * blocks, (i + 1) * blocks) for i in range(_SEQUENCES)]
    parts = [tokens[i * length : (i + 1) * length] for i in range(_SEQUENCES)]

    def run(*pieces: tuple[int, int, int]) -> list[Tensor]:
        """One pass of pieces (sequence, start, end); the logits of each."""
        spans = [Span(tables[i], start, parts[i][start:end]) for i, start, end in pieces]
        counts = [end - start for _, start, end in pieces]
        logits = packed.forward(kv, spans, torch.arange(sum(counts), device=kv.device))
        return list(logits.split(counts))

    def cut(start: int, end: int, size: int) -> Sequence[tuple[int, int]]:
        return [(at, min(at + size, end)) for at in range(start, end, size)]

    begin = length - tail
    whole = run((0, 0, length))[0][begin:]
    for start, end in cut(0, begin, 37):
        run((0, start, end))
    alone = torch.cat([run((0, at, at + 1))[0] for at in range(begin, length)])
    run((1, 0, length - 1), (0, 0, begin), (2, 0, length - 5))
    mixed = []
    for start, end in cut(begin, length, 7):
        others = ((1, length - 1, length), (0, start, end), (2, length - 5, length))
        mixed.append(run(*others)[1])
    return torch.equal(whole, alone) and torch.equal(whole, torch.cat(mixed))
