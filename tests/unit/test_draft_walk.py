"""The machine code of DFlash 2's walk against the walk by PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.choosing import Chooser
from draft_service.context import Context
from draft_service.native_walk import load_walk
from draft_service.selector import CandidateSelector
from draft_service.work import ProposeWork
from flashduet.sampling.params import Sampling
from target_service.compiled.package import compiler

VOCABULARY, HIDDEN, RANK = 700, 6, 6


def selector_of(top_k: int, seed: int) -> CandidateSelector:
    """Its projection is the identity, so that bfloat16 and float32 agree in all but sums."""
    generator = torch.Generator().manual_seed(seed)
    selector = CandidateSelector(VOCABULARY, HIDDEN, RANK, top_k).requires_grad_(False)
    for codebook in (selector.predecessor_codebook, selector.successor_codebook):
        codebook.copy_(torch.randn(codebook.shape, generator=generator).bfloat16())
    selector.hidden_projection.weight.copy_(torch.eye(HIDDEN))
    return selector


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler here")
    # Where there is one, machine code that does not compile or walks elsewhere is a failure.
    assert load_walk(selector_of(4, 0).bfloat16(), None, 4) is not None


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.0]),
    shortlisted=st.booleans(),
    top_k=st.sampled_from([1, 3, 32, 700]),
)
def test_it_walks_as_pytorch_does(
    seed: int, lengths: list[int], temperature: float, shortlisted: bool, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCABULARY, generator=generator)[:300].sort().values
    head_ids = ids if shortlisted else None
    rows = sum(lengths) - len(lengths)
    columns = 300 if shortlisted else VOCABULARY
    logits = (2 * torch.randn(rows, columns, generator=generator)).bfloat16()
    hidden = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
    works = [
        ProposeWork(Context(), 5 + i, i, length, Sampling(temperature, seed=seed + i), i, ())
        for i, length in enumerate(lengths)
    ]
    slow = Chooser(VOCABULARY, head_ids, selector_of(top_k, seed))
    fast = Chooser(VOCABULARY, head_ids, selector_of(top_k, seed).bfloat16())
    wanted = slow.choose(logits.float(), hidden.float(), works)
    for given_, expected in zip(fast.choose(logits, hidden, works), wanted, strict=True):
        assert given_ is not None
        assert expected is not None
        assert given_.token_ids == expected.token_ids
        assert given_.confidence == pytest.approx(expected.confidence, abs=1e-3)


def test_logits_that_are_no_numbers_cost_only_their_own_block() -> None:
    chooser = Chooser(VOCABULARY, None, selector_of(8, 1).bfloat16())
    logits = torch.randn(6, VOCABULARY).bfloat16()
    logits[1] = float("nan")
    works = [ProposeWork(Context(), 5, 1, 4, Sampling(), 0, ()) for _ in range(2)]
    first, second = chooser.choose(logits, torch.randn(6, HIDDEN).bfloat16(), works)
    assert first is None
    assert second is not None
    assert len(second.token_ids) == 3


@pytest.mark.parametrize("temperature", [1e-310, 1e-40])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    for selector in (selector_of(8, 1), selector_of(8, 1).bfloat16()):
        chooser = Chooser(VOCABULARY, None, selector)
        kind = selector.predecessor_codebook.dtype
        works = [
            ProposeWork(Context(), 5, 1, 4, Sampling(warmth), 0, ()) for warmth in (0, temperature)
        ]
        [greedy], [nearly] = (
            chooser.choose(logits.to(kind), hidden.to(kind), [work]) for work in works
        )
        assert greedy is not None
        assert nearly is not None
        assert nearly.token_ids == greedy.token_ids
        assert all(0 <= likely <= 1 for likely in nearly.confidence)


@pytest.mark.parametrize(("anchor", "columns"), [(VOCABULARY, VOCABULARY), (5, VOCABULARY + 1)])
def test_tokens_that_the_codebooks_lack_are_no_memory_to_be_read(anchor: int, columns: int) -> None:
    chooser = Chooser(columns, None, selector_of(8, 1).bfloat16())
    work = ProposeWork(Context(), 5, anchor, 4, Sampling(), 0, ())
    with pytest.raises(IndexError, match=f"codebooks of {VOCABULARY} tokens"):
        chooser.choose(
            torch.randn(3, columns).bfloat16(), torch.randn(3, HIDDEN).bfloat16(), [work]
        )
