"""What `flashduet eval` makes of rounds, and what it compares them with."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashduet.errors import ConfigurationError
from flashduet_cli.evaluation.figures import (
    Answered,
    by_answer_position,
    by_category,
    by_slot,
    figures,
    histogram,
    tau_of,
)
from flashduet_cli.evaluation.lookup import lookup_rounds
from flashduet_cli.evaluation.loops import loops, repeated_share
from flashduet_cli.prompt_file import first_turns


def answered(category: str, rounds: list[int], tokens: list[int] | None = None) -> Answered:
    ids = tuple(tokens if tokens is not None else range(sum(rounds) + 1))
    return Answered("id", category, (1, 2), ids, tuple(rounds), {"budget": 1}, 0.1)


def test_tau_is_tokens_over_rounds_and_the_mean_is_of_answers() -> None:
    tau = tau_of([[1, 1, 1, 1], [4], []])
    assert (tau.answers, tau.tokens, tau.rounds) == (2, 8, 5)
    assert (tau.tau, tau.mean) == (1.6, 2.5)
    assert tau_of([]).tau == 0


def test_figures_split_by_category_slot_and_position() -> None:
    answers = [answered("math", [3, 1, 4, 2]), answered("chat", [1, 1, 1])]
    split = by_category(answers)
    assert list(split) == ["math", "chat"]
    assert (split["math"].tau, split["chat"].tau) == (2.5, 1.0)
    assert histogram(answers) == {0: 4, 1: 1, 2: 1, 3: 1}
    # Last rounds are cut by the answer's end and do not count: 3, 1, 4 and 1, 1 are left.
    assert by_slot(answers, 3) == [2 / 5, 2 / 5, 1 / 5]
    stretches = by_answer_position(answers, width=4)
    assert {name: tau.rounds for name, tau in stretches.items()} == {"0-3": 4, "4-7": 2, "8-11": 1}


def test_looping_answers_are_left_out_of_the_second_figure() -> None:
    looping = answered("chat", [4] * 8, [*range(9), *([1, 2, 3, 4] * 6)])
    found = figures([looping, answered("chat", [1, 1])], slots=3)
    assert found["looping_answers"] == 1
    assert found["overall"]["tau"] == 3.4  # type: ignore[index]
    assert found["without_loops"]["tau"] == 1.0  # type: ignore[index]
    assert found["undrafted_rounds"] == {"budget": 2}


def test_an_answer_loops_when_repeats_cover_more_than_a_fifth() -> None:
    assert repeated_share(range(50)) == 0
    assert repeated_share([*range(42), *range(8)]) == 16 / 50
    assert loops([*range(42), *range(8)])
    assert not loops([*range(90), *range(8)])
    assert repeated_share([]) == 0


def test_prompt_lookup_drafts_what_followed_the_last_match() -> None:
    # Answer 5 6 7 8: after its first token the text ends 1 2 | 5, which was followed by 6 7 8 9.
    assert lookup_rounds([1, 2, 5, 6, 7, 8, 9, 1, 2], [5, 6, 7, 8, 3], block_length=4) == [3 + 1]
    assert lookup_rounds([1, 2, 5, 6, 7, 8, 9, 1, 2], [5, 6, 7, 8, 3], block_length=2) == [2, 2]
    assert lookup_rounds([1, 2], [3, 4, 5, 6], block_length=8) == [1, 1, 1]
    assert lookup_rounds([1], [2], block_length=8) == []


def test_prompt_lookup_sees_its_own_answer_and_never_commits_too_much() -> None:
    rounds = lookup_rounds([9], [1, 2, 3, 1, 2, 3, 1, 2, 3, 1], block_length=8)
    assert sum(rounds) == 9
    assert max(rounds) > 2


@pytest.mark.parametrize("line", ["{", '{"id": 1}', "[1]", '{"id": "a", "turns": []}'])
def test_a_bad_line_of_prompts_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "turns": ["x"]}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match="line 2"):
        first_turns(file)
