"""What the engine is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from draft_service.context import Context
from flashduet.sampling.params import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class IngestWork:
    """Project features and append their keys and values to a context.

    Attributes:
        base: absolute position of the first row.
        token_ids: of the rows, one each.
        features: [rows, feature_width], in any floating dtype, on the engine's device.
        block_ids: of the context, with room for these rows.
    """

    context: Context
    base: int
    token_ids: Sequence[int]
    features: Tensor
    block_ids: Sequence[int]

    @property
    def rows(self) -> int:
        return self.features.shape[0]

    @property
    def end(self) -> int:
        """Rows of context once these are written."""
        return self.base + self.rows

    def split(self, rows: int) -> tuple[IngestWork, IngestWork]:
        """The first `rows` rows, and the others."""
        context, ids, features = self.context, self.token_ids, self.features
        return (
            IngestWork(context, self.base, ids[:rows], features[:rows], self.block_ids),
            IngestWork(context, self.base + rows, ids[rows:], features[rows:], self.block_ids),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RewindWork:
    """Cut a context back to `length` rows, after all that was queued before."""

    context: Context
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class ProposeWork:
    """Draft one block.

    Attributes:
        anchor_position: absolute; the context must have exactly this many rows.
        block_length: anchor + draft tokens, at least 2.
        block_ids: of the context.
        drafter_only: copy nothing from the text.
    """

    context: Context
    anchor_position: int
    anchor_token_id: int
    block_length: int
    sampling: Sampling
    choice: int
    block_ids: Sequence[int]
    drafter_only: bool = False


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens for the positions after the anchor.

    Attributes:
        confidence: the drafter's probability of each, or what a copy is thought to be worth.
        copied: so many of them, the last ones, are from the text itself (`draft_service.lookup`).
    """

    token_ids: list[int]
    confidence: list[float]
    copied: int = 0

    @property
    def without_pass(self) -> bool:
        """The drafter had no part in them."""
        return self.copied == len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step's phases began and ended, `time.time_ns()` values."""

    start_ns: int
    ingested_ns: int
    forwarded_ns: int
    sampled_ns: int

    def since(self, earlier: StepTimes) -> StepTimes:
        """Of a step that these times are the second part of."""
        return replace(self, start_ns=earlier.start_ns, ingested_ns=earlier.ingested_ns)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a proposal, in order.

    None where the context did not have just the rows it needs, or the logits were no numbers.
    """

    drafts: list[Drafts | None]
    times: StepTimes
