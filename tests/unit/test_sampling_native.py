"""Machine code chooses what NumPy and PyTorch choose, and is missed by nobody."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashduet.models_cache import CACHE_VARIABLE
from flashduet.native import building
from flashduet.native.building import LibrarySource
from flashduet.sampling import choose, machine
from flashduet.sampling.by_arrays import choose_by_arrays
from flashduet.sampling.choose import (
    BadLogits,
    RowBlock,
    Shortlist,
    choose_blocks,
    choose_draft_blocks,
)
from flashduet.sampling.history import TokenHistory
from flashduet.sampling.machine import native_choice
from flashduet.sampling.noise import gumbel
from flashduet.sampling.params import Sampling
from target_service.compiled.package import compiler

SETTINGS = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
needs_library = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def library() -> None:
    """Where there is a compiler there is a library: it was not found wrong."""
    assert compiler() is None or native_choice() is not None


samplings = st.builds(
    Sampling,
    temperature=st.one_of(
        st.sampled_from([0.0, 0.8, 1.0, 100.0, 1e-3, 1e-12, 1e-300, 5e-324]), st.floats(0.05, 5.0)
    ),
    top_p=st.one_of(
        st.sampled_from([1.0, 5e-324, 1e-9, 0.25, 0.5, 0.95]),
        st.floats(0, 1, exclude_min=True),
    ),
    top_k=st.one_of(st.just(0), st.integers(1, 700), st.just(2**32 - 1)),
    min_p=st.one_of(st.just(0.0), st.sampled_from([1.0, 0.5, 5e-324]), st.floats(0.0, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.01]),
    logit_bias=st.one_of(
        st.just({}), st.dictionaries(st.integers(0, 400), st.floats(-9, 9), max_size=3)
    ),
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, list[RowBlock]]:
    """Logits of some sessions' blocks: smooth or full of ties, some -inf, both zeros."""
    width = draw(st.sampled_from([1, 2, 127, 128, 129, 300, 640, 2000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    blocks = []
    for sampling in draw(st.lists(samplings, min_size=1, max_size=4)):
        rows, first = draw(st.integers(1, 4)), draw(st.integers(1, 40))
        known = rng.integers(0, width, first).tolist()
        drafts = rng.integers(0, width, rows - 1).tolist()
        history = TokenHistory(first // 2, known) if sampling.needs_history else None
        blocks.append(RowBlock(first, rows, sampling, draw(st.integers(0, 5)), history, (), drafts))
    logits = rng.normal(size=(sum(block.rows for block in blocks), width))
    logits *= draw(st.sampled_from([0.0, 0.1, 1.0, 8.0, 1e4, 1e37]))
    step = draw(st.sampled_from([0.0, 0.5, 4.0]))
    if step:
        logits = np.round(logits / step) * step  # zeros of both signs among them
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = -np.inf
    logits[:, rng.integers(width)] = draw(st.sampled_from([0.0, -0.0, 3.0, 50.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    if dtype is torch.float16:
        logits = np.clip(logits, -6e4, 6e4)
    return torch.from_numpy(logits).to(dtype), blocks


def by_arrays(call: object, *given: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "native_choice", lambda: None)
        return call(*given)  # type: ignore[operator]


@needs_library
@SETTINGS
@given(step=steps())
def test_it_chooses_the_same_tokens(step):
    assert choose_blocks(*step) == by_arrays(choose_blocks, *step)


@needs_library
@SETTINGS
@given(step=steps(), listed=st.floats(0.01, 1.0), picks=st.integers(0, 2**32))
def test_it_drafts_the_same_tokens_as_sure_of_them_from_a_shortlist_or_not(step, listed, picks):
    logits, blocks = step
    columns = logits.shape[1]
    vocabulary = int(columns / listed)
    ids = np.random.default_rng(picks).permutation(vocabulary)[:columns]
    shortlist = Shortlist(torch.from_numpy(np.sort(ids)), vocabulary)
    for given_list in (None, shortlist):
        native = choose_draft_blocks(logits, blocks, given_list)
        arrays = by_arrays(choose_draft_blocks, logits, blocks, given_list)
        assert [draft.tokens for draft in native] == [draft.tokens for draft in arrays]
        for one, other in zip(native, arrays, strict=True):
            # Both take a mass of 1 beside all others for what it is, to float32.
            np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-4, atol=1e-30)


@needs_library
@pytest.mark.parametrize("spread", [0.0, 0.02, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_chooses_the_same_tokens_of_a_whole_vocabulary(spread, dtype):
    """Flat rows try the noise of every token and the exact sums, steep ones the bounds."""
    logits = torch.randn(48, 49_152, generator=torch.Generator().manual_seed(5)) * spread
    kinds = [
        Sampling(temperature=0.8, top_p=0.95, seed=1),
        Sampling(temperature=1.0, seed=2**64 - 1),
        Sampling(temperature=1.2, top_k=50, seed=3),
        Sampling(temperature=1.0, top_k=3000, top_p=0.5, seed=4),
        Sampling(temperature=1.0, top_p=0.3, min_p=0.01, seed=5),
        Sampling(),
    ]
    blocks = [RowBlock(2**32 + 70 * i, 8, kind, i) for i, kind in enumerate(kinds)]
    logits = logits.to(dtype)
    assert choose_blocks(logits, blocks) == by_arrays(choose_blocks, logits, blocks)


@needs_library
@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0, 4.0])
def test_it_decides_top_p_alike_from_bounds_and_from_sums(spread):
    logits = torch.randn(400, 3000, generator=torch.Generator().manual_seed(6)) * spread
    blocks = [
        RowBlock(i, 100, Sampling(temperature=1.0, top_p=top_p, seed=i))
        for i, top_p in enumerate((0.1, 0.5, 0.9, 0.99))
    ]
    assert choose_blocks(logits, blocks) == by_arrays(choose_blocks, logits, blocks)


@needs_library
def test_the_border_of_top_p_is_exact():
    """The mass before token k of n equal ones is k / n: it is out from top_p = k / n down."""
    rows, width = 1000, 384
    logits = torch.zeros(rows, width)
    for share in (1 / width, 129 / width, 383 / width):
        for top_p in (share, math.nextafter(share, 1)):
            block = RowBlock(0, rows, Sampling(temperature=1.0, top_p=top_p, seed=3))
            expected = by_arrays(choose_blocks, logits, [block])
            assert choose_blocks(logits, [block]) == expected
            # Of the number that top_p is, rounded.
            kept = math.ceil(Fraction(top_p) * width)
            assert max(expected[0]) == kept - 1


@needs_library
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 127, 128, 299])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_names_the_same_bad_rows(bad, place, dtype):
    logits = torch.randn(4, 300)
    logits[1, place] = bad
    logits[3] = -torch.inf
    for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9)):
        with pytest.raises(BadLogits) as caught:
            choose_draft_blocks(logits.to(dtype), [RowBlock(0, 4, sampling)])
        assert caught.value.rows == (1, 3)


def test_a_shortlist_fits_its_logits():
    shortlist = Shortlist(torch.tensor([3, 9]), 20)
    with pytest.raises(ValueError, match="3 columns, 2 tokens"):
        choose_draft_blocks(torch.zeros(1, 3), [RowBlock(0, 1, Sampling())], shortlist)


word = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63, 2**64 - 1]))


@needs_library
@SETTINGS
@given(seed=word, choice=word, position=word, first=st.integers(0, 2**40))
def test_noise_has_the_same_bits(seed, choice, position, first):
    library = native_choice()
    assert library is not None
    ids = torch.arange(first, first + 1000)
    assert torch.equal(
        library.gumbel(seed, choice, position, ids), gumbel(seed, choice, position, ids)
    )


# ---- with no library, or a wrong one


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    native_choice.cache_clear()
    yield tmp_path
    native_choice.cache_clear()


@pytest.mark.parametrize("found", [None, "/bin/false"])
def test_without_a_compiler_arrays_choose(nothing_built, monkeypatch, found):
    monkeypatch.setattr(building.shutil, "which", lambda name: found)
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    block = RowBlock(9, 5, Sampling(temperature=0.9, top_p=0.8, seed=1))
    assert choose_blocks(logits, [block]) == [choose_by_arrays(logits, [block], False)[0]]
    assert native_choice() is None


@needs_library
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("elementary.h", "+ 1.0 / 3;", "+ 0.33333333333333;"),
        ("filters.h", "sums.before < mass_limit(top_p, sums.total + least)", "true"),
        ("row.h", "return sound_;", "return false;"),
    ],
)
def test_a_library_that_chooses_otherwise_is_not_used(
    nothing_built, monkeypatch, file, right, wrong
):
    sources = nothing_built / "sources"
    shutil.copytree(machine._FOLDER, sources)
    text = (sources / file).read_text()
    assert right in text
    (sources / file).write_text(text.replace(right, wrong))
    files = [sources / path.name for path in machine._SOURCE.files]
    changed = LibrarySource("choice", files, machine._SOURCE.flags)
    monkeypatch.setattr(machine, "_SOURCE", changed)
    assert native_choice() is None
