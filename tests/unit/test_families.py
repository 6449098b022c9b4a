"""Packed passes give what Transformers gives, in every family; what cannot be served is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashduet.errors import CheckpointError
from target_service.engine import Engine
from target_service.load import load_target
from target_service.settings import TargetSettings
from tests.support.families import CASES, Case, measure
from tests.support.tiny import tiny_target

pytest_plugins = ["tests.support.threads"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.config[:12]}")
def test_a_family_computes_what_transformers_computes(case: Case, tmp_path: Path) -> None:
    found = measure(case, tmp_path)
    assert found.logits < 1e-4
    assert found.features < 1e-3
    assert found.lossless


def engine(folder: Path, **settings: object) -> Engine:
    chosen = {"model": str(folder), "device": "cpu", "dtype": "float32"} | settings
    return Engine(load_target(TargetSettings(**chosen)), 16, 16)


def test_a_model_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    tiny_target(tmp_path, "bloom", n_head=4, n_layer=2)
    with pytest.raises(CheckpointError, match=r"'bloom'.*attention interface"):
        engine(tmp_path)
