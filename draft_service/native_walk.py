"""The walk of a candidate selector (DFlash 2) as machine code of our own (`native/walk.cpp`).

On CPUs in bfloat16, where there is a compiler; elsewhere `draft_service.choosing` seeks candidates
and `draft_service.selector` walks over them by PyTorch. Sums are in float32 here and in bfloat16
there, so that near-ties may be drafted otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draft_service.context import Context
from draft_service.selector import Candidates, CandidateSelector
from draft_service.work import ProposeWork
from flashduet.native.building import LibrarySource, Unusable, load_library
from flashduet.sampling.logit_table import LEAST_TEMPERATURE
from flashduet.sampling.params import Sampling

_FOLDER = Path(__file__).parent / "native"
_NOISE = Path(__file__).parents[1] / "flashduet" / "sampling" / "native"
_FILES = [_NOISE / "elementary.h", _NOISE / "noise.h", _FOLDER / "walk.cpp"]
# As flashduet.sampling.machine: the noise must be NumPy's, bit for bit.
_SOURCE = LibrarySource("walk", _FILES, ["-ffp-contract=off", "-fopenmp-simd"])
_TOLERANCE = 1e-4
# `Block` and `Drafter` of walk.cpp.
_BLOCK = struct.Struct("=qqQQQd")
_DRAFTER = struct.Struct("=Qqq QQqq")


@dataclass(frozen=True)
class NativeWalk:
    """Seeks candidates and walks over them in one call.

    Args:
        library: as `load_walk` prepares it.
        selector: in bfloat16 on the CPU.
        head_ids: int64 [k], the tokens of the logits' columns; None: all.
        noised: of how many times its candidates they are chosen with noise.
    """

    library: ctypes.CDLL
    selector: CandidateSelector
    head_ids: Tensor | None
    noised: int

    def __call__(
        self, logits: Tensor, hidden: Tensor, proposals: Sequence[ProposeWork], winners: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 [n] and their probabilities among their candidates, float32 [n].

        Args:
            logits: bfloat16 [n, k]. hidden: [n, H].
            winners: int64 [n], columns that are chosen without a selector.

        Raises:
            IndexError: an anchor or a column is of a token that the codebooks do not have.
        """
        selector, ids = self.selector, self.head_ids
        self._check_tokens(logits.shape[1], proposals)
        logits, winners = logits.contiguous(), winners.contiguous()
        projected = selector.hidden_projection(hidden).float().contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        confidence = torch.empty(len(logits))
        drafter = _DRAFTER.pack(
            0 if ids is None else ids.data_ptr(),
            logits.shape[1],
            projected.shape[1],
            selector.predecessor_codebook.data_ptr(),
            selector.successor_codebook.data_ptr(),
            selector.top_k,
            selector.top_k * self.noised,
        )
        self.library.flashduet_walk(
            drafter,
            b"".join(map(_block, proposals)),
            len(proposals),
            logits.data_ptr(),
            projected.data_ptr(),
            winners.data_ptr(),
            tokens.data_ptr(),
            confidence.data_ptr(),
        )
        return tokens, confidence

    def _check_tokens(self, columns: int, proposals: Sequence[ProposeWork]) -> None:
        """The machine code reads wherever it is told to."""
        known = len(self.selector.predecessor_codebook)
        highest = columns - 1 if self.head_ids is None else int(self.head_ids[-1])
        anchors = [work.anchor_token_id for work in proposals]
        if max(highest, *anchors) >= known or min(anchors) < 0:
            raise IndexError(
                f"token ids up to {max(highest, *anchors)} for codebooks of {known} tokens"
            )


def load_walk(
    selector: CandidateSelector, head_ids: Tensor | None, noised: int
) -> NativeWalk | None:
    """The machine code for this selector; None where there is none, and the log says why."""
    codebook = selector.predecessor_codebook
    if codebook.dtype is not torch.bfloat16 or codebook.device.type != "cpu":
        return None
    library = _library()
    return None if library is None else NativeWalk(library, selector, head_ids, noised)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library(_SOURCE, _declare, "candidates are chosen")


def _declare(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_void_p
    walk = library.flashduet_walk
    walk.restype = None
    walk.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, *[pointer] * 5]
    _check(library)


@torch.inference_mode()
def _check(library: ctypes.CDLL) -> None:
    """Whether it walks as PyTorch does, in numbers that need no rounding."""
    generator = torch.Generator().manual_seed(0)
    selector = CandidateSelector(300, 8, 8, 5)
    for codebook in (selector.predecessor_codebook, selector.successor_codebook):
        codebook.copy_(torch.randn(300, 8, generator=generator).bfloat16())
    selector.hidden_projection.weight.copy_(torch.eye(8))
    logits, hidden = (torch.randn(7, n, generator=generator).bfloat16() for n in (200, 8))
    ids = torch.arange(200) + 100
    works = [ProposeWork(Context(), 3, 9 + n, n, Sampling(), 0, ()) for n in (4, 5)]
    best = logits.float().topk(5).indices.sort(-1).values
    plain = torch.ones(7)
    candidates = Candidates(ids[best], logits.float().gather(-1, best), plain, plain[:, None] * 0)
    anchors = [work.anchor_token_id for work in works]
    wanted = selector.walk(hidden.float(), candidates, anchors, [3, 4])
    walk = NativeWalk(library, selector.bfloat16(), ids, 4)
    tokens, confidence = walk(logits, hidden, works, torch.zeros(7, dtype=torch.int64))
    error = float((confidence - wanted[1]).abs().max())
    if tokens.tolist() != wanted[0].tolist() or not error < _TOLERANCE:
        raise Unusable(f"it walks elsewhere, or is off by {error:.3g}")


def _block(work: ProposeWork) -> bytes:
    sampling = work.sampling
    return _BLOCK.pack(
        work.block_length - 1,
        work.anchor_token_id,
        sampling.seed,
        work.choice,
        work.anchor_position + 1,
        0.0 if sampling.greedy else max(sampling.temperature, LEAST_TEMPERATURE),
    )
