"""`flashduet models inspect`, over checkpoints of all formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draft_service.inspection import inspect
from draft_service.shortlist import build_shortlist, write_shortlist
from flashduet.models_default import shipped_drafter
from flashduet_cli.main import app
from tests.support.tiny import tiny_drafter, tiny_target
from tests.unit.drafter_formats import as_specforge, as_speculators, make_dflash2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("inspect") / "target", "llama")


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    return tiny_drafter(tmp_path / "drafter", target)


def flashduet(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", "inspect", *arguments])


def test_it_says_what_a_drafter_is_and_that_it_fits(drafter: Path, target: Path) -> None:
    result = flashduet(str(drafter), "--target", str(target), "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["format"] == "z-lab DFlash"
    assert told["trained_for"] == {
        "name": None,
        "hidden_size": 64,
        "layers": 4,
        "vocab_size": 320,
        "layer_ids": [0, 2, 2],
    }
    assert told["network"]["attention"] == ["bidirectional", "bidirectional"]
    assert (told["block_length"], told["mask_token_id"]) == (8, 3)
    assert (told["own"], told["shortlist"], told["expected_tau"]) == ({}, None, None)
    assert told["target"]["fits"] is True


def test_a_target_that_does_not_fit_is_an_error_that_says_why(
    drafter: Path, tmp_path: Path
) -> None:
    deeper = tiny_target(tmp_path / "deeper", "llama", num_hidden_layers=6)
    result = flashduet(str(drafter), "--target", str(deeper))
    assert result.exit_code == 1
    assert "does not fit deeper" in result.stdout
    assert "number of layers: the drafter expects 4, the target has 6" in result.stderr
    result = flashduet(str(drafter), "--target", str(deeper), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["target"]["fits"] is False


def test_what_is_no_drafter_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    result = flashduet(str(target))
    assert result.exit_code == 1
    assert "expected DFlashDraftModel, found LlamaForCausalLM" in result.stderr
    assert "Traceback" not in result.stderr


def test_other_formats_are_told_apart(drafter: Path, tmp_path: Path) -> None:
    verifier = {"verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}}
    other = as_speculators(drafter, tmp_path / "other", speculators_config=verifier)
    told = inspect(other)
    assert told["format"] == "speculators"
    assert told["trained_for"]["name"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert inspect(as_specforge(drafter, tmp_path / "forge"))["format"] == "SpecForge"
    told = inspect(make_dflash2(drafter, kernel=3, top_k=5))
    assert told["format"] == "DFlash 2"
    assert (told["network"]["convolution"], told["network"]["selector_candidates"]) == (3, 5)


def test_the_table_tells_of_shortlist_and_expectation(drafter: Path) -> None:
    write_shortlist(drafter, build_shortlist(range(320), 100))
    promise = {
        "prompt_token_ids": [1, 2],
        "continuation": [3, 4, 5],
        "expected_tau": 2.5,
        "block_length": 4,
    }
    (drafter / "flashduet.json").write_text(json.dumps({"self_test": promise}))
    result = flashduet(str(drafter))
    assert result.exit_code == 0, result.stderr
    assert "the 100 tokens of its shortlist" in result.stdout
    assert "2.5 on its self-test prompt" in result.stdout


def test_a_broken_self_test_is_refused_by_its_field(drafter: Path) -> None:
    (drafter / "flashduet.json").write_text(json.dumps({"self_test": {"expected_tau": 0.5}}))
    result = flashduet(str(drafter))
    assert result.exit_code == 1
    assert "self_test.prompt_token_ids" in result.stderr
    (drafter / "flashduet.json").write_text("{")
    assert "not readable" in flashduet(str(drafter)).stderr


def test_the_shipped_drafter_can_be_inspected() -> None:
    told = inspect(shipped_drafter())
    assert told["trained_for"]["layers"] == 30
    assert told["expected_tau"] > 1
