"""Where the shipped drafter is found: in a source tree, and in an installed wheel."""

import tomllib
from pathlib import Path

import pytest

from flashduet import models_default
from flashduet.errors import ConfigurationError

TREE = Path(__file__).resolve().parents[2]


def test_a_source_tree_has_it_beside_the_packages():
    assert models_default.shipped_drafter().parent == TREE / "models"


def test_a_wheel_has_it_inside_the_package(tmp_path, monkeypatch):
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    put = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["models"]
    folder = tmp_path / put / models_default.shipped_drafter().name
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    monkeypatch.setattr(models_default, "__file__", str(tmp_path / "flashduet" / "x.py"))
    assert models_default.shipped_drafter() == folder


def test_a_missing_one_is_told_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(models_default, "__file__", str(tmp_path / "flashduet" / "x.py"))
    with pytest.raises(ConfigurationError, match="FLASHDUET_DRAFT_MODEL"):
        models_default.shipped_drafter()
