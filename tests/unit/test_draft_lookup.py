"""Drafts copied from the text itself."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draft_service.lookup import continued, look_up
from draft_service.work import Drafts, IngestWork, ProposeWork
from flashduet.sampling.params import Sampling
from flashduet.settings import LONGEST_LOOKUP
from tests.support.tiny import tiny_drafter, tiny_target
from tests.unit.drafting import DraftingEngine, engine_of, features_for

ROUND = [5, 6, 7, 8]


def copied(text: list[int], count: int = 4, least: int = 3) -> list[int] | None:
    drafts = look_up(array("q", text[:-1]), text[-1], count, least)
    return None if drafts is None else drafts.token_ids


def test_what_followed_the_last_tokens_is_copied() -> None:
    assert copied([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]


def test_fewer_repeated_tokens_than_asked_for_are_not() -> None:
    text = [8, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert copied(text) is None
    assert copied(text, least=2) == [4, 5, 6, 9]


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert copied([7, 1, 2, 3, 40, 1, 2, 3, 50, 7, 1, 2, 3], count=1) == [40]
    assert copied([1, 2, 3, 40, 1, 2, 3, 50, 9, 1, 2, 3], count=1) == [50]


def test_a_loop_shorter_than_the_block_goes_round() -> None:
    assert copied([*ROUND, *ROUND], count=9) == [5, 6, 7, 8, 5, 6, 7, 8, 5]
    assert copied([3, 3, 3], count=3, least=2) == [3, 3, 3]


@pytest.mark.parametrize("text", [[1], [1, 1], [1, 2], [2, 1, 2]])
def test_the_shortest_texts(text: list[int]) -> None:
    assert copied(text) is None


def test_confidence_grows_with_the_match_up_to_a_bound() -> None:
    short = look_up(array("q", [1, 2, 9, 1]), 2, 2, 2)
    long = look_up(array("q", list(range(40)) * 2), 0, 2, 2)
    assert short is not None
    assert long is not None
    assert short.confidence == [3 / 4, 4 / 5]
    assert long.confidence[0] == (LONGEST_LOOKUP + 1) / (LONGEST_LOOKUP + 2)
    assert (short.copied, short.without_pass) == (2, True)


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    count=st.integers(1, 12),
    least=st.integers(1, 6),
)
def test_it_is_the_plain_search(text: list[int], count: int, least: int) -> None:
    def matched(end: int) -> int:
        n = 0
        while n <= end and n < LONGEST_LOOKUP and text[end - n] == text[len(text) - 1 - n]:
            n += 1
        return n

    best = max(((matched(end), end) for end in range(len(text) - 1)), default=(0, 0))
    expected = None
    if best[0] >= least:
        grown = list(text)
        for place in range(best[1] + 1, best[1] + 1 + count):
            grown.append(grown[place])
        expected = grown[len(text) :]
    assert copied(text, count, least) == expected


def drafted(*token_ids: int) -> Drafts:
    return Drafts(list(token_ids), [0.5] * len(token_ids))


def test_drafts_that_lead_into_what_was_said_are_continued_by_it() -> None:
    text = array("q", [1, 2, 3, 4, 5, 6, 9])
    found = continued(text, 1, drafted(2, 3, 8, 8, 8), 3)
    assert found.token_ids == [2, 3, 4, 5, 6]
    assert found.confidence == [0.5, 0.5, 4 / 5, 5 / 6, 6 / 7]
    assert (found.copied, found.without_pass) == (3, False)
    assert text == array("q", [1, 2, 3, 4, 5, 6, 9])


def test_drafts_that_lead_nowhere_stay() -> None:
    text = array("q", [1, 2, 3, 4, 5])
    for own in (drafted(9, 3, 4), drafted(2), drafted(7, 8, 1)):
        assert continued(text, 1, own, 3) == own


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("lookup")
    target = tiny_target(folder / "target", "llama")
    return tiny_drafter(folder / "drafter", target), target


def engines(folders: tuple[Path, Path]) -> tuple[DraftingEngine, DraftingEngine]:
    with_lookup = engine_of(*folders, lookup=3)
    return with_lookup, engine_of(*folders)


def fed(engine: DraftingEngine, texts: list[list[int]]) -> list[ProposeWork]:
    """Contexts of these texts, each with a proposal after its last token."""
    works = []
    for seed, text in enumerate(texts):
        held, rows = engine.new_context(), len(text) - 1
        work = engine.ingest_work(held, 0, features_for(engine, rows, seed=seed))
        ingest: IngestWork = replace(work, token_ids=text[:-1])
        engine.step([ingest], [])
        works.append(engine.proposal(held, rows, text[-1], 5))
    return works


def test_an_engine_copies_where_the_text_repeats_and_drafts_elsewhere(
    folders: tuple[Path, Path],
) -> None:
    texts = [[*ROUND, *ROUND], [1, 2, 3, 4, 9, 11, 12], [30, 31, 32, 33, 30, 31, 32]]
    looking, plain = engines(folders)
    with_lookup = looking.step([], fed(looking, texts)).drafts
    without = plain.step([], fed(plain, texts)).drafts
    assert [drafts.without_pass for drafts in with_lookup if drafts] == [True, False, True]
    assert with_lookup[0] is not None
    assert with_lookup[0].token_ids == [5, 6, 7, 8]
    assert with_lookup[1] is not None
    assert without[1] is not None
    assert with_lookup[1] == continued(array("q", texts[1][:-1]), texts[1][-1], without[1], 3)
    assert not any(drafts.copied for drafts in without if drafts)


def test_an_engine_goes_on_with_a_copy_where_its_drafts_lead(folders: tuple[Path, Path]) -> None:
    looking, plain = engines(folders)
    # Drafts hang on features and anchor, not on the ids before it: any text shows the first.
    drafted_alone = plain.step([], fed(plain, [[20, 21, 22, 23, 24, 25, 26, 9, 12]])).drafts[0]
    assert drafted_alone is not None
    first = drafted_alone.token_ids[0]
    text = [9, 12, first, 301, 302, 303, 26, 9, 12]
    found = looking.step([], fed(looking, [text])).drafts[0]
    assert found is not None
    assert found.token_ids == [first, 301, 302, 303]
    assert found.confidence[0] == pytest.approx(drafted_alone.confidence[0])
    assert found.copied == 3

    against = Sampling(logit_bias={302: -100.0})
    ours, theirs = (
        engine.step([], [replace(work, sampling=against) for work in fed(engine, [text])]).drafts[0]
        for engine in (looking, plain)
    )
    assert ours == theirs, "what is against a token of the copy leaves the drafter's own"


def test_who_asks_for_the_drafter_alone_gets_no_copy(folders: tuple[Path, Path]) -> None:
    looking, plain = engines(folders)
    texts = [[*ROUND, *ROUND], [9, 12, 301, 302, 303, 26, 9, 12], [30, 31, 32, 30, 31, 32]]
    alone = [replace(work, drafter_only=True) for work in fed(looking, texts)]
    assert looking.step([], alone).drafts == plain.step([], fed(plain, texts)).drafts


def test_what_a_bias_is_against_is_not_copied(folders: tuple[Path, Path]) -> None:
    looking, plain = engines(folders)
    texts = [[*ROUND, *ROUND]]
    for bias, copied in (({7: -100.0}, False), ({7: 5.0}, True), ({50: -100.0}, True)):
        sampling = Sampling(logit_bias=bias)
        works = [replace(work, sampling=sampling) for work in fed(looking, texts)]
        drafts = looking.step([], works).drafts[0]
        assert drafts is not None
        assert drafts.without_pass is copied
        if not copied:
            own = [replace(work, sampling=sampling) for work in fed(plain, texts)]
            assert drafts == plain.step([], own).drafts[0]


def test_a_step_of_copies_alone_runs_no_pass(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, _ = engines(folders)
    works = fed(looking, [[*ROUND, *ROUND]])
    monkeypatch.setattr(looking.network, "run", None)
    result = looking.step([], works)
    assert result.drafts[0] is not None
    times = result.times
    assert times.start_ns <= times.ingested_ns == times.forwarded_ns < times.sampled_ns


def test_a_rewound_context_forgets_what_it_had(folders: tuple[Path, Path]) -> None:
    looking, _ = engines(folders)
    held = looking.new_context()
    text = [*ROUND, *ROUND]
    work = looking.ingest_work(held, 0, features_for(looking, len(text)))
    looking.step([replace(work, token_ids=text)], [])
    held.engine.truncate(3)
    drafts = looking.step([], [looking.proposal(held, 3, 8, 5)]).drafts[0]
    assert drafts is not None
    assert not drafts.copied


def test_warming_up_runs_the_drafter(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, _ = engines(folders)
    passes: list[int] = []
    run = looking.network.run

    def counted(block: torch.Tensor, *more: Any) -> torch.Tensor:
        passes.append(len(block))
        return run(block, *more)

    monkeypatch.setattr(looking.network, "run", counted)
    looking.warm_up(4)
    assert passes == [4, 4]  # greedy and sampled
