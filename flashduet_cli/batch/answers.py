"""The file of answers: one whole line for each prompt that is done, whenever the run may end.

A line is written by one call, so that a killed process leaves whole lines; what a crash of the
machine or a full disk left of a last line is cut off when the file is opened again. Lines of
prompts that failed are dropped then too, for they are tried again.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashduet.errors import ConfigurationError


class AnswerFile:
    """Owns the file while it is open; a second run on it is refused.

    Attributes:
        done: ids of the prompts that have been answered.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigurationError: it cannot be written, another run writes it, or it holds something
                else than answers.
        """
        self._path = path
        self.done: set[str] = set()
        self._unsynced = False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"--out {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._repair()
        except BlockingIOError:
            os.close(self._file)
            raise ConfigurationError(f"--out {path}: another run is writing it") from None
        except BaseException:
            os.close(self._file)
            raise

    def write(self, entry: dict[str, object]) -> None:
        """Append a line.

        Raises:
            ConfigurationError: it cannot be written whole.
        """
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        try:
            if os.write(self._file, line) != len(line):
                raise ConfigurationError(f"--out {self._path}: no room for a whole line")
        except OSError as error:
            raise ConfigurationError(f"--out {self._path}: {error.strerror}") from error
        self._unsynced = True

    def sync(self) -> None:
        """Make what has been written outlive a crash of the machine."""
        if self._unsynced:
            self._unsynced = False
            os.fsync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.sync()
        os.close(self._file)

    def _repair(self) -> None:
        """Read what is there, leave only whole lines of prompts that were answered."""
        kept: list[bytes] = []
        with os.fdopen(os.dup(self._file), "rb") as reading:
            content = reading.read()
        *lines, rest = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            entry = self._entry(line, number)
            if entry is not None:
                self.done.add(str(entry["id"]))
                kept.append(line + b"\n")
        whole = b"".join(kept)
        if len(whole) == len(content) - len(rest):
            os.ftruncate(self._file, len(whole))
        else:
            # In another order nothing could be lost; a crash in the middle would lose answers.
            self._replace(whole)
        os.lseek(self._file, 0, os.SEEK_END)

    def _entry(self, line: bytes, number: int) -> dict[str, Any] | None:
        """The line's object; None for one that is empty or of a prompt that failed."""
        if not line.strip():
            return None
        try:
            entry = json.loads(line)
            if isinstance(entry["id"], str):
                return None if "error" in entry else entry
        except (ValueError, KeyError, TypeError):
            pass
        raise ConfigurationError(
            f"--out {self._path}, line {number}: not an answer of this command; name another file"
        )

    def _replace(self, content: bytes) -> None:
        """Put another file in this one's place at once, so that a crash leaves one of the two."""
        beside = self._path.with_name(self._path.name + ".new")
        new = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        fcntl.flock(new, fcntl.LOCK_EX)
        view = memoryview(content)
        while view:
            view = view[os.write(new, view) :]
        os.fsync(new)
        os.replace(beside, self._path)
        os.close(self._file)
        self._file = new
