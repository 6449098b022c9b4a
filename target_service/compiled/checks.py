"""Whether two passes of one model tell the same, up to rounding."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from flashduet.errors import ConfigurationError

# Of one pass's logits from another's, by the element type's rounding; a wrong mask is far above.
LARGEST_DIFFERENCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference, against that of the logits around their mean."""
    ours, theirs = ours.double(), theirs.double()
    spread = theirs - theirs.mean(dim=-1, keepdim=True)
    return float((ours - theirs).norm() / spread.norm())


def check_logits(compiled: Tensor, plain: Tensor) -> None:
    """Refuse a compiled pass whose logits [n, V] are not the plain one's, up to rounding.

    Judged by the median row: what a first position gives may hang on a rounding, as its attention
    has nothing else to look at, and a wrong mask or position shows in almost all rows.

    Raises:
        ConfigurationError: tells how far they are apart.
    """
    rows = [relative_difference(ours, theirs) for ours, theirs in zip(compiled, plain, strict=True)]
    difference = statistics.median(rows)
    if not difference < LARGEST_DIFFERENCE[plain.dtype]:
        raise ConfigurationError(
            f"logits of the compiled pass and of a plain one differ by {difference:.0%}"
        )
