"""Libraries come into the cache whole, and alone."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from flashduet.models_cache import CACHE_VARIABLE
from flashduet.native import building
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


def test_a_compiler_may_complain_in_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nprintf 'unzul\\344ssig' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with caplog.at_level("INFO"):
        assert load(source(tmp_path / "sources", "int answer;")) is None
    assert "unzul\ufffdssig" in caplog.text


X86 = "processor : 0\ncpu family : 25\ncpu MHz : {}\nflags : fpu sse2 {}\n"
ARM = "processor : 0\nBogoMIPS : {}\nFeatures : fp asimd {}\nCPU part : 0xd40\n"


@pytest.mark.parametrize("processor", [X86, ARM], ids=["x86", "arm"])
def test_processors_that_share_a_cache_have_a_library_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    made_of = source(tmp_path, "")

    def path(clock: str, able_to: str) -> Path:
        (tmp_path / "cpuinfo").write_text(processor.format(clock, able_to))
        return made_of.path

    monkeypatch.setattr(building, "_CPU_INFO", tmp_path / "cpuinfo")
    assert path("2400", "sve") == path("3100", "sve")
    assert path("2400", "sve") != path("2400", "sve2")
