"""The two ways in which a compiled package runs over the block store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flashduet.kv.storage import KVStorage
from target_service.attention import running
from target_service.batching import Span
from target_service.compiled.library import load_library
from target_service.compiled.tables import native_store, plan
from target_service.packed import GatherRoom, PackedPass
from target_service.survey import AttentionLayers


class Runner(Protocol):
    def run(self, kv: KVStorage, spans: Sequence[Span], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The package's outputs; keys and values of the spans' rows are in `kv` afterwards."""


def make_runner(package: Path, layers: AttentionLayers) -> Runner:
    """The native one where its library is.

    Raises:
        RuntimeError: the package cannot be loaded.
    """
    return NativeRunner(package, layers) if load_library() else PythonRunner(package, layers)


class PythonRunner:
    """Attention comes back to Python in each layer."""

    def __init__(self, package: Path, layers: AttentionLayers) -> None:
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
        self._layers = layers
        self._room = GatherRoom()

    def run(self, kv: KVStorage, spans: Sequence[Span], inputs: Sequence[Tensor]) -> list[Tensor]:
        with running(PackedPass(self._layers, kv, spans, self._room)):
            return list(self._loader.boxed_run(list(inputs)))


class NativeRunner:
    """A pass is one call, made without the interpreter's lock."""

    def __init__(self, package: Path, layers: AttentionLayers) -> None:
        self._package: Any = torch.classes.flashduet.Package(str(package))
        self._layers = layers
        self._stores: WeakKeyDictionary[KVStorage, Any] = WeakKeyDictionary()

    def run(self, kv: KVStorage, spans: Sequence[Span], inputs: Sequence[Tensor]) -> list[Tensor]:
        store = self._stores.get(kv)
        if store is None:
            store = self._stores[kv] = native_store(kv, self._layers)
        outputs: list[Tensor] = self._package.run(store, plan(spans, kv.block_tokens), inputs)
        return outputs
