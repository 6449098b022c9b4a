"""Whether what was compiled computes the same as what was there before, up to rounding."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from flashduet.errors import ConfigurationError
from flashduet.kv.storage import KVStorage, LayerShape
from target_service.attention import Extras
from target_service.batching import Span
from target_service.compiled.tables import native_store, plan
from target_service.packed import GatherRoom, PackedPass
from target_service.survey import AttentionLayers
from target_service.visibility import Visibility

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


def check_attention() -> None:
    """Refuse a native kernel, loaded into this process, that does not attend as Python's does.

    Raises:
        ConfigurationError: tells how far they are apart.
    """
    layers = AttentionLayers({}, (LayerShape(2, 32, 32),), (Visibility(),))
    spans = [Span([4, 0, 3], 5, [0] * 30), Span([1], 0, [0])]
    for dtype, most in LARGEST_DIFFERENCE.items():
        query, key, value = (torch.randn(1, heads, 31, 32).to(dtype) for heads in (6, 2, 2))
        kv, other = (KVStorage(layers.shapes, 5, 16, dtype) for _ in range(2))
        ours = native_store(kv, layers).attend(
            plan(spans, 16), query, key, value, None, 0, 0.2, None
        )
        attention = PackedPass(layers, other, spans, GatherRoom())
        theirs = attention.attend_at(0, query, key, value, Extras(0.2))
        difference = relative_difference(ours, theirs)
        if not difference < most:
            raise ConfigurationError(f"attention in {dtype} differs by {difference:.0%}")
