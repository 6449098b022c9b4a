"""The rows of `flashduet bench engine`, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flashduet_cli.bench import equality_rows, sharing_rows, speed_rows, step_rows
from flashduet_cli.bench.figures import Bounds, Measured
from flashduet_cli.bench.workbench import Workbench

Measure = Callable[[Workbench], Awaitable[Measured]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: for --only.
        title: what is divided by what.
        bounds: what counts as enough.
        measure: takes the figure.
        needs: processes that may run (idle) meanwhile; others are ended before.
    """

    name: str
    title: str
    bounds: Bounds
    measure: Measure
    needs: tuple[str, ...] = ()


def _at_least(floor: float, goal: float, unit: str = "x") -> Bounds:
    return Bounds(floor, goal, most=False, unit=unit)  # type: ignore[arg-type]


def _at_most(floor: float | None, goal: float, unit: str = "x") -> Bounds:
    return Bounds(floor, goal, most=True, unit=unit)  # type: ignore[arg-type]


_FAST = ("fast",)
_PEER = ("fast", "transformers_peer")
_ENGINES = ("fast", "target", "draft")

ROWS = (
    Row(
        "plain",
        "drafting off, one session / Transformers generate, tokens/s",
        _at_least(1.6, 2.2),
        speed_rows.plain_speed,
        _PEER,
    ),
    Row(
        "batch",
        "offline batch of 64 / Transformers generate at batch 64, tokens/s",
        _at_least(1.5, 4),
        speed_rows.batch,
        _PEER,
    ),
    Row(
        "sessions",
        "drafting off, 32 sessions / 1 session, tokens/s",
        _at_least(4, 8),
        speed_rows.sessions,
        _FAST,
    ),
    Row(
        "ttft",
        "time to first token, drafting on / off",
        _at_most(1.1, 1.03),
        speed_rows.first_token,
        _FAST,
    ),
    Row(
        "round",
        "(round - target forward - draft forward) / round, one session",
        _at_most(0.08, 0.03, "%"),
        step_rows.round_overhead,
        _ENGINES,
    ),
    Row(
        "sampling",
        "sampling (T=0.8, top-p 0.95, 16 rows) / verify",
        _at_most(0.10, 0.05, "%"),
        step_rows.sampling_cost,
        _ENGINES,
    ),
    Row(
        "step",
        "target step of 16 tokens / its bare compiled linear layers",
        _at_most(1.5, 1.25),
        step_rows.step_cost,
        ("target", "draft"),
    ),
    Row(
        "transport",
        "memfd / memcpy, tensor to tensor with descriptor and ack, 2,048 rows",
        _at_least(0.6, 0.8),
        sharing_rows.transport,
        ("draft", "transport"),
    ),
    Row(
        "prefix-after",
        "15 requests after a first one with their 1,000-token prefix: prefill work",
        _at_most(0.15, 0.1),
        sharing_rows.prefix_after,
        _FAST,
    ),
    Row(
        "prefix-at-once",
        "16 requests at once with a common 1,000-token prefix: prefill work",
        _at_most(0.15, 0.1),
        sharing_rows.prefix_at_once,
        _FAST,
    ),
    Row(
        "gaps",
        "time between tokens beside a 4,000-token prefill / alone, p99",
        _at_most(3, 2),
        sharing_rows.token_gaps,
        _FAST,
    ),
    Row(
        "leaks",
        "blocks, records, sessions left after 2,000 random requests with cancels",
        _at_most(0, 0, ""),
        sharing_rows.leftovers,
        _FAST,
    ),
    Row(
        "start",
        "start to ready, warm caches",
        _at_most(30, 15, "s"),
        sharing_rows.start,
        _FAST,
    ),
    Row(
        "invariant",
        "bfloat16 batch_invariant: equal across block lengths and concurrency",
        _at_least(1, 1, "%"),
        equality_rows.invariant,
        ("fast", "invariant"),
    ),
    Row(
        "invariant-cost",
        "batch_invariant: slower by",
        _at_most(None, 0.10, "%"),
        equality_rows.invariant_cost,
        ("fast", "invariant"),
    ),
    Row(
        "concurrency",
        "output at concurrency 32 = output alone, float32",
        _at_least(1, 1, "%"),
        equality_rows.concurrency,
        ("exact",),
    ),
)
