"""What a target's blocks are used for."""

from __future__ import annotations

from dataclasses import dataclass

from target_service.seating import Seating


@dataclass(frozen=True, slots=True)
class KVLoad:
    """A moment's count of blocks, and totals since the start.

    Attributes:
        free_blocks: nobody's; `cached_blocks` of them still hold a prefix that may be found again.
        preemptions: sessions whose blocks were taken for older ones.
        prompt_tokens, cached_prompt_tokens: asked for, and those that needed no computing.
    """

    num_blocks: int
    block_tokens: int
    free_blocks: int
    cached_blocks: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int

    @classmethod
    def of(cls, seating: Seating) -> KVLoad:
        pool = seating.pool
        return cls(
            num_blocks=pool.num_blocks,
            block_tokens=pool.block_tokens,
            free_blocks=pool.free_blocks,
            cached_blocks=pool.cached_blocks,
            preemptions=seating.preemptions,
            prompt_tokens=seating.prompt_tokens,
            cached_prompt_tokens=seating.cached_prompt_tokens,
        )

    @property
    def held_tokens(self) -> int:
        """Positions that sessions have their blocks for; shared ones count once."""
        return (self.num_blocks - self.free_blocks) * self.block_tokens
