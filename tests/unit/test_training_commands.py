"""The training commands on a tiny random target, each in a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from typer.testing import CliRunner, Result

from draft_service.shortlist import read_shortlist, write_shortlist
from drafter_training.ablations import ABLATIONS
from drafter_training.cli import app
from drafter_training.scoring import score_answers
from drafter_training.shards import Sequence, ShardFolder
from drafter_training.stages import INTERRUPTED
from drafter_training.trainer import Trainer
from tests.support.tiny import IM_END, tiny_drafter, tiny_target


def invoke(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, result.output
    return result


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a target and some shards."""
    root = tmp_path_factory.mktemp("workspace")
    target = tiny_target(root / "target")
    common = ("--target", target, "--preset", "smoke", "--out", root)
    invoke("data", *common, "--answer-tokens", 600, "--slots", 8)
    return root


def common(root: Path) -> tuple[object, ...]:
    return ("--target", root / "target", "--preset", "smoke", "--out", root)


def test_runs_are_begun_resumed_and_not_mixed_up(root: Path) -> None:
    data = ("--data", root / "data")
    first = invoke("run", *common(root), *data, "--name", "a", "--epochs", 0.5)
    drafter = Path(first.stdout.strip())
    assert (drafter / "model.safetensors").is_file()
    facts = json.loads((root / "a/run.json").read_text())["facts"]
    refused = invoke("run", *common(root), *data, "--name", "a", "--epochs", 0.5, expect=1)
    assert "--resume" in refused.output
    other = ("run", *common(root), *data, "--name", "a", "--resume", "--epochs", 0.5)
    assert "another preset" in invoke(*other, "--anchors", 3, expect=1).output.replace("\n", " ")
    # The data may have grown; the run keeps to what it began with.
    invoke("data", *common(root), "--answer-tokens", 750, "--slots", 8)
    invoke(*other)
    assert json.loads((root / "a/run.json").read_text())["facts"] == facts
    # How much is kept on disk changes no weight.
    invoke(*other, "--cache-gib", 2)
    # A run of a release that had no selector and did not count a loop's tokens.
    record = json.loads((root / "a/run.json").read_text())
    del record["facts"]["preset"]["shape"]["selector_rank"]
    del record["facts"]["preset"]["data"]["loop_tokens"]
    (root / "a/run.json").write_text(json.dumps(record))
    invoke(*other)
    with_selector = invoke(*other, "--selector-rank", 8, expect=1)
    assert "another preset" in with_selector.output.replace("\n", " ")
    invoke("run", *common(root), *data, "--name", "b", "--epochs", 0.5, "--init-from", drafter)
    begun = json.loads((root / "b/run.json").read_text())
    assert begun["start"] == "the drafter drafter"
    with FileLock(root / "b/lock"):
        twice = invoke("run", *common(root), *data, "--name", "b", "--resume", expect=1)
    assert "another process" in twice.output.replace("\n", " ")
    wrong = ("run", *common(root), *data, "--name", "c", "--layers", 1, "--init-from", drafter)
    assert "num_layers" in invoke(*wrong, expect=1).output


def test_a_run_that_is_stopped_before_its_first_step_can_be_begun_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", *common(root), "--data", root / "data", "--name", "early", "--epochs", 0.5)
    validate = Trainer.validate

    def stopped(self: Trainer) -> object:
        self.stop()
        return validate(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "validate", stopped)
        assert "stopped at step 0" in invoke(*run, expect=INTERRUPTED).output
    assert not (root / "early/drafter").exists()
    assert Path(invoke(*run).stdout.strip()).is_dir()


@pytest.mark.parametrize("name", ["injection", "features", "block", "short-blocks"])
def test_an_ablation_trains_every_variant(root: Path, name: str) -> None:
    found = invoke("ablate", name, *common(root), "--data", root / "data", "--steps", 2, "--json")
    rows = json.loads(found.stdout.strip().splitlines()[-1])["rows"]
    assert [row["variant"] for row in rows] == list(ABLATIONS[name])
    assert all(row["steps"] == 2 and row["tau"] >= 1 for row in rows)
    assert name != "block" or all(set(row["tau_at"]) == {"4", "8", "16"} for row in rows)


def test_studies_tell_how_drafts_would_be_taken(root: Path) -> None:
    run = ("run", *common(root), "--data", root / "data", "--name", "studied", "--epochs", 0.5)
    drafter = invoke(*run).stdout.strip()
    shared = ("--target", root / "target", "--out", root, "--drafter", drafter, "--json")
    shared += ("--sequences", 6, "--answer-length", 16)
    found = invoke("study", "sampling", *shared, "--temperatures", "0,1")
    table = json.loads(found.stdout)["tokens_a_round"]
    assert set(table["0"]) == {"greedy drafts"}
    assert set(table["1"]) == {"position-keyed", "rejection", "greedy drafts"}
    # Of all rules with these drafts rejection sampling takes most.
    assert table["1"]["rejection"] > table["1"]["position-keyed"] - 0.05 >= 0.95
    copies = json.loads(invoke("study", "lookup", *shared, "--least", "0,3,16").stdout)
    by_least = copies["tau_by_tokens_repeated"]
    assert set(by_least) == {"0", "3", "16"}
    assert all(tau >= 1 for tau in by_least.values())
    slots = json.loads(invoke("study", "slots", *shared, "--keep", "1,3").stdout)
    assert set(slots["tau_by_drafts_kept"]) == {"0", "1", "3"}
    assert [row["miss"] for row in slots["cascade"]] == [1, 2]
    # All drafts kept: nothing is left to a second pass.
    assert slots["tau_by_drafts_kept"]["3"] == slots["tau_by_drafts_kept"]["0"]
    assert slots["tau_by_drafts_kept"]["0"] == by_least["0"]
    # Copies are studied as is served: from the shortlist.
    write_shortlist(Path(drafter), torch.tensor([300, 301]))
    listed = json.loads(invoke("study", "lookup", *shared, "--least", "0").stdout)
    assert listed["tau_by_tokens_repeated"]["0"] < by_least["0"]


@pytest.mark.parametrize("value", ["x", "0,3", ","])
def test_temperatures_that_are_none_are_refused_by_their_option(value: str) -> None:
    refused = invoke("study", "sampling", "--temperatures", value, expect=2)
    assert "--temperatures" in refused.output


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(("lookup", "--least", value) for value in ("-1", "17", "", "three")),
        *(("slots", "--keep", value) for value in ("0", "-1", ",")),
    ],
)
def test_numbers_out_of_their_limits_are_refused_by_their_option(
    name: str, option: str, value: str
) -> None:
    refused = invoke("study", name, option, value, expect=2)
    assert option in refused.output
    assert "from" in refused.output


def test_no_more_drafts_are_kept_than_a_block_has(root: Path, tmp_path: Path) -> None:
    drafter = tiny_drafter(tmp_path / "drafter", root / "target")
    shared = ("--target", root / "target", "--out", root, "--drafter", drafter)
    shared += ("--sequences", 6, "--answer-length", 16)
    refused = invoke("study", "slots", *shared, "--keep", "1,99", expect=1)
    assert "--keep: 99" in refused.output.replace("\n", " ")


def test_a_shortlist_is_chosen_by_counts_and_written(root: Path) -> None:
    run = ("run", *common(root), "--data", root / "data", "--name", "listed", "--epochs", 0.5)
    drafter = Path(invoke(*run).stdout.strip())
    shared = ("--target", root / "target", "--out", root / "other", "--drafter", drafter)
    shared += ("--data", root / "data", "--sizes", "40,0", "--write", 50, "--json")
    rows = json.loads(invoke("shortlist", *shared).stdout)["sizes"]
    assert [row["size"] for row in rows] == [40, 320]
    assert rows[0]["covered"] < rows[1]["covered"] == 1
    listed = read_shortlist(drafter, 320)
    assert listed is not None
    assert len(listed) == 50
    assert IM_END in listed


def test_long_prompts_come_from_a_folder_of_answers(root: Path) -> None:
    invoke(
        *("data", *common(root), "--folder", "long", "--passages-from", root / "data"),
        *("--max-length", 384, "--answer-tokens", 60, "--slots", 4),
    )
    assert ShardFolder(root / "long").answer_tokens >= 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", "huge"), "huge"),
        (("--target", "/nowhere/at-all"), "/nowhere/at-all"),
        (("ablate", "colour", "--data", "x"), "colour"),
        (("run", "--data", "x", "--weighting", "odd"), "odd"),
        ((), "--target"),
    ],
)
def test_a_wrong_option_is_named(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    given = (
        arguments
        if not arguments or "--target" in arguments or arguments[0][0] != "-"
        else ("--target", str(tmp_path), *arguments)
    )
    result = CliRunner().invoke(app, list(given))
    assert result.exit_code in (1, 2)
    assert words in result.output.replace("\n", "")


def test_answers_are_scored_with_the_shortlist_that_is_served(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    drafter = tiny_drafter(tmp_path / "drafter", target)
    answer = [Sequence([5, 6, 7] + [40] * 25, 3, greedy=True)]
    assert max(score_answers(target, drafter, answer)[0].rounds) < 8
    write_shortlist(drafter, torch.tensor([40]))
    assert score_answers(target, drafter, answer)[0].rounds == [8, 8, 8]
