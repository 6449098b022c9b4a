"""The cache holds whole things only, and nothing of processes that were killed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from flashduet.models_cache import CACHE_VARIABLE, put_in_place, staging

STAGES_AND_WAITS = """
import sys
from pathlib import Path
from flashduet.models_cache import staging
with staging(Path(sys.argv[1])) as room:
    (room / "half").write_bytes(bytes(1000))
    print(room, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def staged_by_another(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that is making something, and where."""
    process = subprocess.Popen(
        [sys.executable, "-c", STAGES_AND_WAITS, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_what_is_staged_is_gone_at_the_end_however_it_ends(cache: Path) -> None:
    with staging(cache / "models") as room:
        (room / "half").write_text("")
    with pytest.raises(KeyboardInterrupt), staging(cache / "models"):
        raise KeyboardInterrupt
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("kind", ["models", "compiled"])
def test_what_a_killed_process_staged_is_removed_by_the_next(cache: Path, kind: str) -> None:
    with staged_by_another(cache / "models") as (process, left):
        assert (left / "half").is_file()
        process.kill()
        process.wait()
        assert (left / "half").is_file()
        with staging(cache / kind) as room:
            assert not left.exists()
            assert room.is_dir()


def test_what_others_are_making_stays(cache: Path) -> None:
    with (
        staged_by_another(cache / "models") as (_, theirs),
        staging(cache / "models") as first,
        staging(cache / "models") as second,
    ):
        assert len({theirs, first, second}) == 3
        assert (theirs / "half").is_file()
        assert first.is_dir()


def test_nothing_else_is_removed(cache: Path) -> None:
    others = [cache / "models" / name for name in ("llama", ".git")]
    for folder in others:
        folder.mkdir(parents=True)
    with staging(cache / "models"):
        assert all(folder.is_dir() for folder in others)


def test_a_thing_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, path = tmp_path / "room" / "made", tmp_path / "kept"
    (made / "inner").mkdir(parents=True)
    (made / "inner" / "weights").write_text("all of them")
    done: list[str] = []

    def sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def replace(source: Path, place: Path, rename=os.replace) -> None:  # type: ignore[no-untyped-def]
        done.append("renamed")
        rename(source, place)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    put_in_place(made, path)
    assert set(done[:3]) == {"made", "inner", "weights"}
    assert done[3:] == ["renamed", tmp_path.name]
    assert (path / "inner" / "weights").read_text() == "all of them"


@pytest.mark.parametrize(
    ("of_folders", "reason", "held"),
    [(True, errno.EINVAL, True), (True, errno.EIO, False), (False, errno.EINVAL, False)],
)
def test_only_that_folders_are_never_synced_is_put_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_folders: bool, reason: int, held: bool
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "weights").write_text("all of them")

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folders:
            raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", sync)
    with nullcontext() if held else pytest.raises(OSError, match=os.strerror(reason)):
        put_in_place(made, tmp_path / "kept")
    assert (tmp_path / "kept").exists() == held


def test_a_file_takes_a_files_place(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")
    (tmp_path / "made").write_text("new")
    put_in_place(tmp_path / "made", tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
