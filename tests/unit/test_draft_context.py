"""Blocks of context: what a session's rows are, whom they are shared with, how they are kept."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.context import Context, ContextPlan, ContextStore
from draft_service.context_pool import ContextPool, HeldContext
from draft_service.network import DrafterConfig, KeysValues
from draft_service.quantized_rows import QuantizedStorage
from tests.unit.drafting import Sequence, engine_of, features_for

CPU = torch.device("cpu")
BLOCK_ROWS = 4
KEY = b"target, drafter, salt"


@pytest.fixture(scope="module")
def config(tiny_models: Path) -> DrafterConfig:
    return DrafterConfig.load(tiny_models / "drafter")


def rows_of(config: DrafterConfig, numbers: list[int]) -> KeysValues:
    """Recognizable rows: row r holds r in keys and -r in values."""
    shape = (len(numbers), config.num_layers, config.num_kv_heads, config.head_dim)
    keys = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None].expand(shape)
    return KeysValues(keys, -keys)


class Model:
    """A store and a pool beside plain lists of what each session's rows must be."""

    def __init__(self, config: DrafterConfig) -> None:
        plan = ContextPlan(rows=40, block_rows=BLOCK_ROWS, max_block_length=6)
        self.config = config
        self.store = ContextStore(config, plan, torch.float32, CPU)
        self.pool = ContextPool(plan)
        self.sessions: list[tuple[HeldContext, list[int]]] = []

    def open(self, token_ids: list[int]) -> None:
        held = self.pool.open(KEY, token_ids)
        assert held.end % BLOCK_ROWS == 0
        assert held.end < max(1, len(token_ids))
        self.sessions.append((held, token_ids[: held.end]))

    def append(self, index: int, token_ids: list[int]) -> None:
        """A row's number is made of all tokens up to it, as a target's features are."""
        held, rows = self.sessions[index]
        if not self.pool.has_room(held, len(token_ids)):
            assert self.pool.free_blocks * BLOCK_ROWS < len(token_ids)
            return
        work = self.pool.take(held, token_ids, torch.zeros(len(token_ids), 1))
        slots = self.store.slots(work.block_ids, work.base, work.end)
        rows += token_ids
        numbers = [hash(tuple(rows[: i + 1])) % 4096 for i in range(work.base, work.end)]
        self.store.write(slots, rows_of(self.config, numbers))
        work.context.extend(work.token_ids)
        self.pool.written(held, work.end)

    def propose(self, index: int, length: int) -> None:
        """A block's own rows are seen after the context's, and leave no trace."""
        held, rows = self.sessions[index]
        seen = self.store.seen(self.pool.blocks_for(held, length), 0, held.end, length)
        block = torch.full((length, self.config.num_kv_heads, self.config.head_dim), 1e6)
        for layer in range(self.config.num_layers):
            found = self.store.with_block(layer, seen, block, block)
            assert found.keys.shape[1] == len(rows) + length
            assert (found.keys[:, len(rows) :] == 1e6).all()

    def rewind(self, index: int, length: int) -> None:
        held, rows = self.sessions[index]
        end = self.pool.rewind(held, min(length, held.end))
        assert min(length, len(rows)) - BLOCK_ROWS < end <= min(length, len(rows))
        held.engine.truncate(end)
        del rows[end:]

    def check(self) -> None:
        for held, rows in self.sessions:
            assert held.end == held.engine.length == len(rows)
            found = self.store.rows(held.table.block_ids, len(rows))
            expected = [hash(tuple(rows[: i + 1])) % 4096 for i in range(len(rows))]
            for layer in range(self.config.num_layers):
                assert found.keys[layer, -1, :, 0].tolist() == expected
                assert found.values[layer, 0, :, -1].tolist() == [-row for row in expected]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), TOKENS),
        st.tuples(st.just("append"), st.integers(0, 3), TOKENS),
        st.tuples(st.just("propose"), st.integers(0, 3), st.integers(2, 6)),
        st.tuples(st.just("rewind"), st.integers(0, 3), st.integers(0, 20)),
        st.tuples(st.just("close"), st.integers(0, 3)),
    ),
    max_size=14,
)


@settings(max_examples=120)
@given(STEPS)
def test_a_context_is_the_list_of_its_rows_whoever_else_holds_blocks(
    config: DrafterConfig, steps: list[tuple]
) -> None:
    model = Model(config)
    for name, *values in steps:
        if name == "open":
            model.open(values[0])
        elif model.sessions:
            index = values[0] % len(model.sessions)
            if name == "close":
                model.pool.close(model.sessions.pop(index)[0])
            else:
                getattr(model, name)(index, *values[1:])
        model.check()
    for held, _ in model.sessions:
        model.pool.close(held)
    assert model.pool.free_blocks == model.pool.blocks


def test_rows_are_found_by_tokens_and_key_only_once_they_are_written(
    config: DrafterConfig,
) -> None:
    pool = ContextPool(ContextPlan(rows=64, block_rows=BLOCK_ROWS))
    tokens = list(range(10))
    first = pool.open(KEY, tokens)
    assert pool.has_room(first, 10)
    work = pool.take(first, tokens, torch.zeros(10, 1))
    assert pool.open(KEY, tokens).end == 0
    pool.written(first, work.end)
    assert pool.open(KEY, tokens).end == 8
    assert pool.open(KEY, [*tokens[:5], 99, 98, 97, 96]).end == 4
    assert pool.open(b"another salt", tokens).end == 0
    assert pool.open(KEY, tokens[:8]).end == 4  # one is left to compute
    pool.close(first)
    assert pool.open(KEY, tokens).end == 8


def test_a_context_cannot_be_cut_forwards() -> None:
    context = Context(array("q", range(5)))
    for length in (6, -1):
        with pytest.raises(ValueError, match="cut a context of 5 rows"):
            context.truncate(length)


def test_a_session_without_room_for_its_block_still_drafts(tiny_models: Path) -> None:
    """Its rows lie elsewhere then, and the drafts are the same."""
    plan = ContextPlan(rows=48, block_rows=16, max_block_length=8)
    small = engine_of(tiny_models / "drafter", tiny_models / "target", plan=plan)
    large = engine_of(tiny_models / "drafter", tiny_models / "target")
    full = Sequence.of(small, 47)
    work = full.proposal(5, 8)
    assert len(work.block_ids) * 16 == 48
    expected = large.draft_logits([Sequence.of(large, 47).proposal(5, 8)])
    before = small.rows(full.context)
    assert (small.draft_logits([work]) - expected).abs().max() < 1e-5
    for part, unchanged in zip(small.rows(full.context), before, strict=True):
        assert torch.equal(part, unchanged)


def test_scattered_blocks_give_the_same_drafts(tiny_models: Path) -> None:
    engine = engine_of(tiny_models / "drafter", tiny_models / "target")
    whole = engine.draft_logits([Sequence.of(engine, 40).proposal(5, 8)])
    features, held = features_for(engine, 40), [engine.new_context() for _ in range(3)]
    for start in range(0, 40, 8):  # growing in turn, their blocks interleave
        for context in held:
            engine.ingest(context, start, features[start : start + 8])
    ids = held[0].table.block_ids
    ids[0], ids[1] = ids[1], ids[0]  # surely no run
    engine.store.write(
        engine.store.slots(ids, 0, 40),
        KeysValues(*(part.permute(2, 0, 1, 3) for part in engine.rows(held[1]))),
    )
    assert (engine.draft_logits([engine.proposal(held[0], 40)]) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_rows_are_near_and_half_as_large(
    config: DrafterConfig, dtype: torch.dtype
) -> None:
    plan = ContextPlan(rows=64, dtype="int8")
    stores = [ContextStore(config, p, dtype, CPU) for p in (plan, ContextPlan(rows=64))]
    assert isinstance(stores[0].storage, QuantizedStorage)
    # head_dim 16: 16 bytes and a 4-byte scale, against 16 numbers.
    assert stores[0].row_bytes * 16 * dtype.itemsize == stores[1].row_bytes * 20
    assert stores[0].nbytes < stores[1].nbytes
    shape = (40, config.num_layers, config.num_kv_heads, config.head_dim)
    rows = KeysValues(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
    rows.keys[7] *= 1000.0  # a loud position costs the others nothing
    rows.values[3] = 0.0
    for store in stores:
        store.write(slice(0, 40), rows)
    for near, exact in zip(*(store.rows(range(3), 40) for store in stores), strict=True):
        assert near.dtype == dtype
        limit = exact.float().abs().amax(-1, keepdim=True) / 127 * 0.5 + exact.float().abs() / 128
        assert ((near.float() - exact.float()).abs() <= limit).all()
    rows.keys[5, 0, 0, 0] = float("nan")
    stores[0].write(slice(0, 40), rows)
    assert stores[0].rows(range(3), 40).keys[0, 0, 5].isnan().all()


def test_drafts_over_eight_bit_rows_are_close(tiny_models: Path) -> None:
    exact = engine_of(tiny_models / "drafter", tiny_models / "target")
    plan = ContextPlan(rows=1024, dtype="int8")
    rounded = engine_of(tiny_models / "drafter", tiny_models / "target", plan=plan)
    logits = [e.draft_logits([Sequence.of(e, 60).proposal(5, 8)]) for e in (exact, rounded)]
    differences = (logits[0] - logits[1]).abs()
    assert 0 < differences.max() < 0.1 * logits[0].std()
