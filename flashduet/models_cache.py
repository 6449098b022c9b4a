"""The user's cache: where it is, and how files and folders come into it, whole or not at all.

What takes time to make is made in a staging folder beside its place and renamed. A process that is
killed meanwhile leaves its staging folder; the next one that stages anything removes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
from filelock import FileLock

CACHE_VARIABLE = "FLASHDUET_CACHE"
# Another process may be dequantizing the same file; a large one takes minutes.
LOCK_TIMEOUT_S = 1800.0
# Nobody else's files are called that.
_STAGING = ".flashduet-"
# Held for as long as its maker lives, however that ends.
_ALIVE = ".alive"

# (stage, bytes done, bytes in all); all is 0 where it is not known.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


def cache_root() -> Path:
    """`FLASHDUET_CACHE`, or the platform's cache folder of this user."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("flashduet"))


def locked(name: str) -> FileLock:
    """A lock between processes on one entry of the cache; use it as a context manager."""
    folder = cache_root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock", timeout=LOCK_TIMEOUT_S)


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """An empty folder inside `folder`, to make something in; gone at the end.

    Removes those of processes that are gone, here and in the whole cache.

    Raises:
        OSError: the cache cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Nobody may take a folder for left that its maker has not locked yet.
    with locked("staging"):
        _sweep(folder)
        room = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        alive = FileLock(room / _ALIVE)
        alive.acquire(blocking=False)
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
        alive.release()


def put_in_place(made: Path, path: Path) -> None:
    """Rename a staged file or folder to `path`, so that it is there whole after a power cut too.

    Takes a file's place. A folder has to be the first there.
    """
    for each in (made, *made.rglob("*")):
        if not each.is_symlink():
            _sync(each)
    os.replace(made, path)
    _sync(path.parent)


def _sweep(folder: Path) -> None:
    """Remove staging folders that nobody holds."""
    for left in {*folder.glob(f"{_STAGING}*"), *cache_root().glob(f"*/{_STAGING}*")}:
        # Held, of another user, or gone by now.
        with suppress(OSError), FileLock(left / _ALIVE, blocking=False):
            shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no such thing of folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sha256_of(path: Path, progress: Progress = no_progress, stage: str = "checking") -> str:
    """Hex digest of a file's content."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            progress(stage, done, total)
    return digest.hexdigest()
