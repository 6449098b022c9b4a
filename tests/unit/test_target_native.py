"""Native attention computes what Python's does, reads and writes nothing but its own slots, and
refuses what would."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashduet.errors import ConfigurationError
from flashduet.kv.storage import KVStorage, LayerShape
from target_service.attention import Extras, running
from target_service.batching import Span
from target_service.compiled import library
from target_service.compiled.tables import native_store, plan
from target_service.packed import GatherRoom, PackedPass
from target_service.survey import AttentionLayers
from target_service.visibility import Visibility

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
RULES = [
    Visibility(),
    Visibility(window=1),
    Visibility(window=70),
    Visibility(chunk=7),
    Visibility(chunk=200),
]
# Rows and earlier positions of each sequence of a pass.
PASSES = [
    [(1, 0)],
    [(8, 256)],
    [(1, 65), (1, 3), (130, 64), (16, 200), (2, 511)],
    [(1, 17 * index) for index in range(12)],
    [(300, 0)],
]


@dataclass(frozen=True)
class Sizes:
    kv_heads: int
    group: int
    key_size: int
    value_size: int
    block_tokens: int


SIZES = [Sizes(3, 3, 64, 64, 16), Sizes(1, 8, 20, 40, 48), Sizes(2, 1, 33, 7, 1)]


@dataclass(frozen=True)
class Scene:
    """A layer's operands and a store that holds the earlier positions of its sequences.

    All slots that no sequence has written yet are NaN.
    """

    layers: AttentionLayers
    kv: KVStorage
    spans: list[Span]
    query: Tensor
    key: Tensor
    value: Tensor
    extras: Extras

    def attend(self, numbers: Tensor | None = None) -> Tensor:
        numbers = plan(self.spans, self.kv.block_tokens) if numbers is None else numbers
        extras = self.extras
        output: Tensor = native_store(self.kv, self.layers).attend(
            numbers,
            self.query,
            self.key,
            self.value,
            extras.sinks,
            0,
            extras.scaling,
            extras.softcap,
        )
        return output

    def expected(self) -> Tensor:
        """Python's, in float32, over a store without NaN."""
        kv = KVStorage(self.kv.layers, self.kv.num_blocks, self.kv.block_tokens, torch.float32)
        for ours, theirs in ((kv.keys[0], self.kv.keys[0]), (kv.values[0], self.kv.values[0])):
            ours.copy_(theirs.nan_to_num(nan=0.0))
        operands = (tensor.float() for tensor in (self.query, self.key, self.value))
        attention = PackedPass(self.layers, kv, self.spans, GatherRoom())
        return attention.attend_at(0, *operands, self.extras)


def make_scene(
    sizes: Sizes,
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[tuple[int, int]] = ((8, 40),),
    rule: Visibility = RULES[0],
    softcap: float | None = None,
    sinks: bool = False,
    filled: int = 0,
    scattered: bool = True,
) -> Scene:
    torch.manual_seed(7)
    size = sizes.block_tokens
    needed = [-(-(rows + base) // size) for rows, base in lengths]
    shape = LayerShape(sizes.kv_heads, sizes.key_size, sizes.value_size)
    kv = KVStorage((shape,), sum(needed) + 2, size, dtype)
    kv.keys[0].fill_(torch.nan)
    kv.values[0].fill_(torch.nan)
    free = list(range(kv.num_blocks))
    if scattered:
        random.Random(3).shuffle(free)
    spans = []
    for (rows, base), blocks in zip(lengths, needed, strict=True):
        own, free = free[:blocks], free[blocks:]
        spans.append(Span(own, base, [0] * rows))
        earlier = (torch.randn(sizes.kv_heads, base, shape.key_size).to(dtype),)
        earlier += (torch.randn(sizes.kv_heads, base, shape.value_size).to(dtype),)
        kv.put(0, kv.locate(own, 0, base), *earlier)
    count, heads = sum(rows for rows, _ in lengths) + filled, sizes.kv_heads * sizes.group

    def rows_of(heads: int, width: int) -> Tensor:
        return torch.randn(1, count, heads, width).to(dtype).transpose(1, 2)

    query, key = rows_of(heads, sizes.key_size), rows_of(sizes.kv_heads, sizes.key_size)
    value = rows_of(sizes.kv_heads, sizes.value_size)
    extras = Extras(sizes.key_size**-0.5, softcap, torch.randn(heads) if sinks else None)
    layers = AttentionLayers({}, (shape,), (rule,))
    return Scene(layers, kv, spans, query, key, value, extras)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("native", "threads")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_computes_what_python_computes(
    rule: Visibility, sizes: Sizes, dtype: torch.dtype
) -> None:
    for index, lengths in enumerate(PASSES):
        scene = make_scene(
            sizes,
            dtype,
            lengths,
            rule,
            softcap=(None, 3.0, 30.0)[index % 3],
            sinks=index % 2 == 1,
            filled=index % 4,
            scattered=index != 1,
        )
        expected, got = scene.expected(), scene.attend()
        assert got.shape == expected.shape
        assert torch.allclose(got.float(), expected, atol=TOLERANCE[dtype], rtol=0.01)


@pytest.mark.usefixtures("native")
def test_only_the_rows_own_slots_are_written() -> None:
    scene = make_scene(SIZES[0], lengths=[(5, 30), (1, 16)])
    kv = scene.kv
    before = [table.clone() for table in (kv.keys[0], kv.values[0])]
    scene.attend()
    row = 0
    for span in scene.spans:
        slots, end = kv.locate(span.block_ids, span.base, span.end), row + len(span.token_ids)
        keys, values = kv.fetch(0, slots)
        assert torch.equal(keys, scene.key[0, :, row:end])
        assert torch.equal(values, scene.value[0, :, row:end])
        kv.put(0, slots, *(torch.full_like(part, torch.nan) for part in (keys, values)))
        row = end
    for table, held in zip((kv.keys[0], kv.values[0]), before, strict=True):
        assert torch.equal(table.nan_to_num(nan=-1.0), held.nan_to_num(nan=-1.0))


@pytest.mark.usefixtures("native")
def test_a_bad_number_reaches_its_own_sequence_and_no_other() -> None:
    scene = make_scene(SIZES[0], torch.bfloat16, [(2, 20), (2, 20)])
    scene.value[0, :, 0] = torch.nan
    output = scene.attend()[0]
    assert output[:2].isnan().all()
    assert not output[2:].isnan().any()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([8, 40, 3], "ends within its block ids"),
        ([8, 40], "ends within a span"),
        ([8, 40, -1], "ends within its block ids"),
        ([8, 40, 3, 0, 1, 6], "no block 6"),
        ([8, 40, 3, 0, 1, -1], "no block -1"),
        ([8, 41, 3, 0, 1, 2], "8 rows from 41 on in 3 blocks of 16"),
        ([0, 40, 3, 0, 1, 2], "0 rows from 40"),
        ([8, -1, 3, 0, 1, 2], "8 rows from -1"),
        ([2**62, 2**62, 3, 0, 1, 2], "rows from"),
        ([9, 30, 3, 0, 1, 2], "9 rows planned, 8 given"),
    ],
)
def test_a_plan_outside_the_store_is_refused(numbers: list[int], told: str) -> None:
    scene = make_scene(SIZES[0])
    before = scene.kv.keys[0].clone()
    assert scene.kv.num_blocks == 5  # and one that is not handed out
    with pytest.raises((ValueError, RuntimeError), match=told):
        scene.attend(torch.tensor(numbers))
    assert torch.equal(scene.kv.keys[0].nan_to_num(), before.nan_to_num())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("query", lambda tensor: tensor[:, :8], "queries"),
        ("query", lambda tensor: tensor[..., :63], "queries"),
        ("query", lambda tensor: tensor[0], "queries are not"),
        ("key", lambda tensor: tensor[:, :, :7], "do not fit"),
        ("value", lambda tensor: tensor[:, :2], "do not fit"),
        ("value", lambda tensor: tensor.double(), "store's type"),
    ],
)
def test_operands_that_do_not_fit_are_refused(name: str, change: Any, told: str) -> None:
    scene = make_scene(SIZES[0])
    operands = {field: getattr(scene, field) for field in ("query", "key", "value")}
    operands[name] = change(operands[name])
    store = native_store(scene.kv, scene.layers)
    numbers = plan(scene.spans, 16)
    with pytest.raises((ValueError, RuntimeError), match=told):
        store.attend(numbers, *operands.values(), None, 0, 0.1, None)
    with pytest.raises(IndexError, match="no layer 1"):
        store.attend(numbers, scene.query, scene.key, scene.value, None, 1, 0.1, None)


@pytest.mark.usefixtures("native")
def test_tables_that_do_not_fit_are_refused() -> None:
    scene = make_scene(SIZES[0])
    for keys in ([], [scene.kv.keys[0][:2]], [scene.kv.keys[0].transpose(1, 2)]):
        with pytest.raises((ValueError, RuntimeError), match=r"layer|slots"):
            torch.classes.flashduet.Store(keys, scene.kv.values, [0], [0], 16)


@pytest.mark.usefixtures("native")
def test_threads_with_stores_of_their_own_do_not_meet() -> None:
    scenes = [make_scene(SIZES[0], lengths=[(3 + index, 100)]) for index in range(4)]
    expected = [scene.expected() for scene in scenes]

    def run(scene: Scene) -> list[Tensor]:
        return [scene.attend() for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for outputs, right in zip(pool.map(run, scenes), expected, strict=True):
            assert all(torch.allclose(output, right, atol=1e-5) for output in outputs)


@pytest.mark.usefixtures("native")
def test_a_pass_that_python_runs_keeps_its_operator() -> None:
    scene = make_scene(SIZES[0])
    kv = scene.kv
    kv.keys[0].nan_to_num_()
    kv.values[0].nan_to_num_()
    with running(PackedPass(scene.layers, kv, scene.spans, GatherRoom())):
        output = torch.ops.flashduet.attend(
            scene.query, scene.key, scene.value, None, 0, scene.extras.scaling, None
        )
    assert torch.allclose(output, scene.attend(), atol=1e-5)


def test_without_a_library_attention_stays_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(library, "_loaded", False)
    monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path))
    assert not library.load_library()
    assert "runs in Python: its library is not compiled yet" in caplog.text
    library.library_path().parent.mkdir()
    library.library_path().write_bytes(b"no library")
    assert not library.load_library()
    assert "runs in Python: " in caplog.records[-1].message


def test_a_compiler_that_fails_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "compiler", lambda: "/bin/false")
    with pytest.raises(ConfigurationError, match="cannot be compiled"):
        library.build_library()
    monkeypatch.setattr(library, "compiler", lambda: None)
    with pytest.raises(ConfigurationError, match=r"install g\+\+"):
        library.build_library()
    assert list((tmp_path / "native").iterdir()) == []
