"""Choosing as machine code of our own (`native/`), where there is a compiler: one call for a step.

It gives the tokens that flashduet.sampling.by_arrays gives: noise and scores are the same
operations on the same numbers, and top-p is decided by exact sums in both.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flashduet.native.building import LibrarySource, Unusable, load_library
from flashduet.sampling.by_arrays import choose_by_arrays
from flashduet.sampling.logit_table import BadLogits
from flashduet.sampling.noise import gumbel
from flashduet.sampling.params import Sampling
from flashduet.sampling.penalties import RowBlock
from flashduet.sampling.shortlist import Shortlist

_FOLDER = Path(__file__).parent / "native"
_FILES = ("elementary.h", "noise.h", "row.h", "filters.h", "race.h", "confidence.h", "choice.cpp")
# A product and a sum in one rounding would give other bits than NumPy's two. The second is for
# sums in any order, which nothing is decided by.
_FLAGS = ("-ffp-contract=off", "-fopenmp-simd")
_SOURCE = LibrarySource("choice", [_FOLDER / name for name in _FILES], _FLAGS)
# `Rule` of filters.h.
_RULE = struct.Struct("=qQQQddqd")
_CONFIDENCE_TOLERANCE = 1e-4


class NativeChoice:
    """Chooses for the rows of a step in one call that holds no interpreter's lock.

    Args:
        library: as `load` prepares it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def choose(
        self,
        logits: Tensor,
        blocks: Sequence[RowBlock],
        confident: bool,
        shortlist: Shortlist | None = None,
    ) -> tuple[list[int], list[float]]:
        """The tokens of all rows, and their confidences if wanted, else an empty list.

        Args:
            logits: [n, V], or [n, k] of a shortlist; on the CPU, any float type, bias and penalties
                applied.

        Raises:
            BadLogits: a row holds NaN or +inf, or nothing but -inf.
        """
        if logits.dtype is not torch.bfloat16:
            logits = logits.float()
        logits = logits.contiguous()
        rows, columns = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        confidences = torch.empty(rows if confident else 0, dtype=torch.float64)
        bad = self._library.flashduet_choose(
            logits.data_ptr(),
            logits.dtype is torch.bfloat16,
            columns,
            shortlist.on_cpu.data_ptr() if shortlist else None,
            shortlist.group_starts.data_ptr() if shortlist else None,
            shortlist.vocabulary if shortlist else columns,
            b"".join(map(_rule, blocks)),
            len(blocks),
            tokens.data_ptr(),
            confidences.data_ptr() if confident else None,
        )
        chosen = tokens.tolist()
        if bad:
            raise BadLogits(tuple(row for row, token in enumerate(chosen) if token < 0))
        return chosen, confidences.tolist()

    def gumbel(self, seed: int, choice: int, position: int, token_ids: Tensor) -> Tensor:
        """As flashduet.sampling.noise.gumbel, of int64 [n] on the CPU."""
        token_ids = token_ids.contiguous()
        noise = torch.empty(len(token_ids), dtype=torch.float64)
        self._library.flashduet_gumbels(
            seed, choice, position, token_ids.data_ptr(), len(token_ids), noise.data_ptr()
        )
        return noise


@functools.cache
def native_choice() -> NativeChoice | None:
    """The machine code, compiled if need be; None where there is none, and the log says why."""
    library = load_library(_SOURCE, _prepare, "tokens are chosen")
    return None if library is None else NativeChoice(library)


def _rule(block: RowBlock) -> bytes:
    sampling = block.sampling
    return _RULE.pack(
        block.rows,
        block.first_position,
        sampling.seed,
        block.choice,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
    )


def _prepare(library: ctypes.CDLL) -> None:
    library.flashduet_choose.restype = ctypes.c_int64
    library.flashduet_choose.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    library.flashduet_gumbels.restype = None
    library.flashduet_gumbels.argtypes = [
        *[ctypes.c_uint64] * 3,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    choice = NativeChoice(library)
    _check_noise(choice)
    _check_tokens(choice)


def _check_noise(choice: NativeChoice) -> None:
    """Whether its noise has the same bits: a compiler might join two roundings."""
    ids = torch.arange(4096) * 31
    for position in (0, 2**40):
        if not torch.equal(choice.gumbel(7, 3, position, ids), gumbel(7, 3, position, ids)):
            raise Unusable("its noise is other noise")


def _check_tokens(choice: NativeChoice) -> None:
    """Whether it chooses what NumPy and PyTorch do."""
    filters: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}]
    filters.append({"min_p": 0.05, "top_p": 0.5})
    warm = [
        Sampling(temperature=temperature, seed=7, **given)  # type: ignore[arg-type]
        for temperature, given in itertools.product((0.7, 3.0), filters)
    ]
    rows = 6
    blocks = [RowBlock(5, rows, sampling, 1) for sampling in (Sampling(), *warm)]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows * len(blocks), 700, generator=generator) * 3
    for given in (logits, logits.bfloat16()):
        try:
            tokens, confidences = choice.choose(given, blocks, True)
        except BadLogits as error:
            raise Unusable(f"it takes good logits for bad: {error}") from error
        wanted, likely = choose_by_arrays(given, blocks, True)
        if tokens != wanted:
            raise Unusable("it chooses other tokens")
        if not all(
            math.isclose(one, other, rel_tol=_CONFIDENCE_TOLERANCE)
            for one, other in zip(confidences, likely, strict=True)
        ):
            raise Unusable("it tells other confidences")
