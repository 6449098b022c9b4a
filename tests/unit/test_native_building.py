"""Libraries come into the cache whole, and alone."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from flashduet.models_cache import CACHE_VARIABLE
from flashduet.native.building import LibrarySource, load_library

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler here"
)


def source(folder: Path, text: str) -> LibrarySource:
    folder.mkdir(exist_ok=True)
    (folder / "answer.cpp").write_text(text)
    return LibrarySource("answer", [folder / "answer.cpp"])


def load(made_of: LibrarySource) -> ctypes.CDLL | None:
    return load_library(made_of, lambda _: None, "answers are given")


def test_what_a_killed_compilation_left_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    made_of = source(tmp_path / "sources", 'extern "C" int answer() { return 42; }')
    left = made_of.path.parent / ".flashduet-left"
    left.mkdir(parents=True)
    (left / made_of.path.name).write_bytes(b"half of it")
    library = load(made_of)
    assert library is not None
    assert library.answer() == 42
    assert list(made_of.path.parent.iterdir()) == [made_of.path]


def test_a_compilation_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    made_of = source(tmp_path / "sources", "this is no C++")
    assert load(made_of) is None
    assert list(made_of.path.parent.iterdir()) == []
