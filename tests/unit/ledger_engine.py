"""A step engine whose keys and values are the tokens themselves, for tests of scheduling.

Each next token is computed from what the sequence's blocks hold, so that a block which was lost,
shared too early or overwritten gives another answer.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flashduet.errors import FlashduetError
from flashduet.kv.blocks import BlockPool
from flashduet.sampling import Sampling
from target_service.job import Job, Outcome, PrefillJob, RoundJob
from target_service.roster import Roster
from target_service.scheduler import StepEngine
from target_service.session import (
    ContextRows,
    Interval,
    PrefillChunk,
    Session,
    StepFailure,
    StepResult,
    VerifyBlock,
    WorkItem,
)

VOCABULARY = 50
NO_TIME = Interval(0, 0)


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("I", tokens).tobytes()) % VOCABULARY


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """The answer that nothing may change."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def session(tokens: Sequence[int], *, limit: int = 1000, **fields: object) -> Session:
    given: dict[str, object] = {
        "session_id": random.randbytes(16),
        "epoch": 0,
        "choice": 0,
        "sampling": Sampling(),
        "token_limit": limit,
        "prompt_length": len(tokens),
        "token_ids": list(tokens),
    }
    return Session(**(given | fields))  # type: ignore[arg-type]


@dataclass
class LedgerEngine:
    """Counts what it computes.

    Attributes:
        steps: rows of each item, step by step.
        prefilled: rows of prompts computed.
    """

    pool: BlockPool
    steps: list[list[int]] = field(default_factory=list)
    prefilled: int = 0
    fail_next: bool = False

    def __post_init__(self) -> None:
        self._slots: list[tuple[int, int] | None]
        self._slots = [None] * (self.pool.num_blocks * self.pool.block_tokens)

    def step(self, items: Sequence[WorkItem]) -> list[StepResult | StepFailure]:
        assert len({id(item.session) for item in items}) == len(items)
        self.steps.append([_rows(item) for item in items])
        if self.fail_next:
            self.fail_next = False
            return [StepFailure(FlashduetError("it broke")) for _ in items]
        return [
            self._prefill(item) if isinstance(item, PrefillChunk) else self._verify(item)
            for item in items
        ]

    def _prefill(self, item: PrefillChunk) -> StepResult:
        given = item.session
        self._write(given, item.base, item.token_ids)
        self.prefilled += len(item.token_ids)
        chosen = (next_token(self._read(given)),) if item.last else ()
        result = self._result(item, item.token_ids, chosen, 0)
        given.commit(chosen)
        return result

    def _verify(self, item: VerifyBlock) -> StepResult:
        given, drafts = item.session, list(item.token_ids)
        self._write(given, item.base, [given.token_ids[item.base], *drafts])
        tokens, chosen = self._read(given)[: item.base + 1], []
        for draft in [*drafts, None]:
            chosen.append(next_token(tokens))
            if chosen[-1] != draft:
                break
            tokens.append(chosen[-1])
        accepted = len(chosen) - 1
        given.table.length = item.base + accepted + 1
        rows = [given.token_ids[item.base], *drafts[:accepted]]
        result = self._result(item, rows, tuple(chosen), accepted)
        given.commit(chosen)
        return result

    def _result(
        self, item: WorkItem, rows: Sequence[int], committed: tuple[int, ...], accepted: int
    ) -> StepResult:
        context, skip = None, max(0, item.session.draft_context_hit - item.base)
        if item.layer_ids and skip < len(rows):
            wanted = tuple(rows[skip:])
            context = ContextRows(item.base + skip, wanted, torch.zeros(len(wanted), 1))
        return StepResult(committed, accepted, _rows(item), context, NO_TIME, NO_TIME)

    def _write(self, given: Session, base: int, tokens: Sequence[int]) -> None:
        assert given.table.length == base, "every position before it must be there"
        for position, token in enumerate(tokens, base):
            self._slots[self._slot(given, position)] = position, token
        given.table.length = base + len(tokens)

    def _read(self, given: Session) -> list[int]:
        held = [self._slots[self._slot(given, p)] for p in range(given.table.length)]
        assert [entry and entry[0] for entry in held] == list(range(len(held)))
        return [entry[1] for entry in held if entry is not None]

    def _slot(self, given: Session, position: int) -> int:
        size = self.pool.block_tokens
        return given.table.block_ids[position // size] * size + position % size


def _rows(item: WorkItem) -> int:
    return len(item.token_ids) + isinstance(item, VerifyBlock)


class Recorder:
    """A feed that keeps what it gets, and insists on its order."""

    def __init__(self, base: int = 0) -> None:
        self.layer_ids: tuple[int, ...] = (1,)
        self.token_ids: list[int] = []
        self.base = base

    def publish(self, rows: ContextRows, traceparent: str) -> None:
        assert rows.base == self.base + len(self.token_ids), "a gap, or rows sent twice"
        self.token_ids.extend(rows.token_ids)


class Simulation:
    """A roster and a ledger engine under a clock that moves only by what steps cost.

    Args:
        step_s, row_s, pair_s: of a step, of each of its rows, of each position that one attends to.
        engine: in the ledger engine's place.
    """

    def __init__(
        self,
        *,
        blocks: int = 64,
        size: int = 4,
        max_step_tokens: int = 64,
        chunk_tokens: int = 16,
        step_s: float = 0.010,
        row_s: float = 0.001,
        pair_s: float = 0.0,
        engine: StepEngine | None = None,
    ) -> None:
        self.pool = BlockPool(blocks, size)
        self.engine = LedgerEngine(self.pool)
        self._engine: StepEngine = engine or self.engine
        self.roster = Roster(self.pool, max_step_tokens=max_step_tokens, chunk_tokens=chunk_tokens)
        self.now = 0.0
        self.waited = 0.0
        self._cost = step_s, row_s, pair_s

    def prefill(self, given: Session, feed: Recorder | None = None) -> Job:
        return self._add(PrefillJob(given, feed, ""))

    def round(
        self, given: Session, drafts: Sequence[int] = (), feed: Recorder | None = None
    ) -> Job:
        return self._add(RoundJob(given, feed, "", given.anchor_position, drafts))

    def step(self) -> list[Job] | None:
        """One step; the jobs that ended in it, or None where there is nothing to do now."""
        plan = self.roster.plan(self.now)
        if not plan.turns:
            return None
        results = self._engine.step([turn.item for turn in plan.turns])
        step_s, row_s, pair_s = self._cost
        rows = [_rows(turn.item) for turn in plan.turns]
        bases = [turn.item.base for turn in plan.turns]
        pairs = sum(n * base + n * (n + 1) // 2 for n, base in zip(rows, bases, strict=True))
        seconds = step_s + row_s * sum(rows) + pair_s * pairs
        self.now += seconds
        ends = self.roster.account(plan.turns, results, seconds, self.now)
        for turn, result in zip(plan.turns, results, strict=True):
            if turn.job.feed is not None and isinstance(result, StepResult) and result.context:
                turn.job.feed.publish(result.context, "")
                rows = result.context
                turn.seat.session.draft_context_hit = rows.base + len(rows.token_ids)
        for job, end in ends:
            if isinstance(end, Exception):
                job.future.set_exception(end)
            else:
                job.future.set_result(end)
        return [job for job, _ in ends]

    def run(self, *jobs: Job, within_s: float = 1000.0) -> list[Outcome]:
        """Step, and let time pass where the plan says so, until all of the jobs have ended."""
        end = self.now + within_s
        while not all(job.future.done() for job in jobs):
            assert self.now < end, "no progress"
            plan = self.roster.plan(self.now) if self.step() is None else None
            if plan is not None:
                assert not plan.turns
                assert plan.wait_s is not None, "it would wait for ever"
                assert plan.wait_s > 0, "it would spin"
                self.now += plan.wait_s
                self.waited += plan.wait_s
        return [job.future.result() for job in jobs]

    def _add(self, job: Job) -> Job:
        self.roster.add(job, self.now)
        return job
