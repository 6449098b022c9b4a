"""Fixtures: tiny models once a session, and stacks of real processes over them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tiny models gain nothing from a second thread, and on a busy machine two wait for each other. Set
# before torch is imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests that want compiled passes say so: compiling takes a minute.
os.environ.setdefault("FLASHDUET_TARGET_COMPILE", "off")
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # Headers that the compiler has read once for all of them.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="flashduet-compiler-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

from hypothesis import HealthCheck, settings

from tests.support.pair import PATIENCE, Pair
from tests.support.tiny import tiny_drafter, tiny_target

# How long an example takes says something about the machine, and each run tries the same ones: what
# is to find new ones is the fuzzer.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` (random Llama) and two drafters for it, `drafter` and `other`."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_target(root / "target", "llama")
    tiny_drafter(root / "drafter", target)
    tiny_drafter(root / "other", target, seed=99, layers=1)
    return root


@pytest.fixture(scope="session")
def pair(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One stack for all tests that leave it as they found it.

    Only its drafter drafts: copies of the text would hide how that does.
    """
    running = Pair(
        tiny_models / "target",
        tiny_models / "drafter",
        tmp_path_factory.mktemp("traces"),
        FLASHDUET_DRAFT_LOOKUP="0",
        **PATIENCE,
    )
    yield running
    running.stop()


@pytest.fixture(scope="session")
def other_pair(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The same target with another drafter, and with copies of the text."""
    running = Pair(
        tiny_models / "target",
        tiny_models / "other",
        tmp_path_factory.mktemp("other_traces"),
        **PATIENCE,
    )
    yield running
    running.stop()


@pytest.fixture
def own_pair(tiny_models: Path, tmp_path: Path) -> Iterator[Pair]:
    """A stack that the test may break."""
    running = Pair(tiny_models / "target", tiny_models / "drafter", tmp_path / "traces", **PATIENCE)
    yield running
    running.stop()


@pytest.fixture
def brisk_pair(tiny_models: Path, tmp_path: Path) -> Iterator[Pair]:
    """One that waits for a draft no longer than it does by itself."""
    running = Pair(tiny_models / "target", tiny_models / "drafter", tmp_path / "traces")
    yield running
    running.stop()
