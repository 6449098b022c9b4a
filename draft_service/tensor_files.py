"""Named tensors of a checkpoint folder, read one by one from its safetensors files.

Only safetensors: a pickle is never opened. Errors name the file, the tensor, what was expected and
what was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashduet.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class TensorFiles:
    """Where each tensor of a folder lies, sharded or not.

    Raises:
        CheckpointError: no weights, an unreadable index, or a shard that is missing or truncated.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}
        if (folder / INDEX_FILE).is_file():
            self._file_of = self._from_index()
        elif (folder / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._names_in(SINGLE_FILE), SINGLE_FILE)
        else:
            raise CheckpointError(
                f"{folder.name}: expected {SINGLE_FILE} or {INDEX_FILE}, found "
                f"{self._weight_files() or 'no weights'}; convert the weights to safetensors"
            )

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shown(self, name: str) -> str:
        """`folder/file: tensor`, for messages."""
        return f"{self._folder.name}/{self._file_of.get(name, SINGLE_FILE)}: {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header alone."""
        with _opened(self._folder / self._require(name)) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One floating-point tensor as stored, on the CPU.

        Raises:
            CheckpointError: it is missing, or its shape is not `shape`, or it holds other numbers.
        """
        tensor = self.read_any(name)
        found = tuple(tensor.shape)
        if shape is not None and found != shape:
            raise CheckpointError(
                f"{self.shown(name)}: expected shape {list(shape)}, found {list(found)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.shown(name)}: expected a floating-point tensor, found {tensor.dtype}"
            )
        return tensor

    def read_any(self, name: str) -> Tensor:
        """One tensor of whatever type and shape, on the CPU.

        Raises:
            CheckpointError: it is missing.
        """
        with _opened(self._folder / self._require(name)) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _require(self, name: str) -> str:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.shown(name)}: expected this tensor, found none "
                f"(the folder has {len(self._file_of)} others)"
            )
        return self._file_of[name]

    def _from_index(self) -> dict[str, str]:
        source = f"{self._folder.name}/{INDEX_FILE}"
        try:
            file_of = json.loads((self._folder / INDEX_FILE).read_text("utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{source}: expected an object with weight_map: {error}"
            ) from error
        if not isinstance(file_of, Mapping):
            raise CheckpointError(f"{source}: weight_map: expected an object, found {file_of!r}")
        held: dict[str, set[str]] = {}
        for name, file in file_of.items():
            # A checkpoint comes from elsewhere: its index may point at nothing outside its folder.
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{source}: {name}: expected a file name, found {file!r}")
            if file not in held:
                held[file] = set(self._names_in(file))
            if name not in held[file]:
                raise CheckpointError(
                    f"{self._folder.name}/{file}: {name}: expected this tensor as {INDEX_FILE} "
                    "says, found none"
                )
        return dict(file_of)

    def _names_in(self, file: str) -> list[str]:
        with _opened(self._folder / file) as opened:
            return list(opened.keys())

    def _weight_files(self) -> str:
        found = sorted(
            p.name for p in self._folder.glob("*") if p.suffix in (".bin", ".pt", ".pth")
        )
        return ", ".join(found)


def _opened(path: Path) -> safe_open:
    shown = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise CheckpointError(f"{shown}: expected a safetensors file, found none")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{shown}: expected a whole safetensors file, found {path.stat().st_size} bytes that "
            f"are not one ({error}); the file is truncated or damaged, fetch it again"
        ) from error
