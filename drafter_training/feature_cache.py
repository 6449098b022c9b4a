"""Context features of token shards: kept on disk within a bound, recomputed when they are gone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from flashduet.models_cache import put_in_place, staging


class FeatureCache:
    """Owns a folder of feature files, one a shard, named by what they were computed from.

    A row holds the tapped layers' outputs and, last, the final normed state: bfloat16
    [(n + 1) H]. Past ``max_bytes`` nothing more is kept; rows are then computed when asked for.
    """

    def __init__(
        self, folder: Path, target_hash: str, layer_ids: list[int], max_bytes: int
    ) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        taps = f"{target_hash}:{','.join(map(str, layer_ids))}"
        self._key = hashlib.sha256(taps.encode()).hexdigest()[:12]
        folder.mkdir(parents=True, exist_ok=True)
        self._bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def path(self, shard_hash: str) -> Path:
        return self._folder / f"{shard_hash[:24]}-{self._key}.safetensors"

    def keep(self, shard_hash: str, rows: torch.Tensor) -> bool:
        """Writes a shard's rows [tokens, (n + 1) H]; False if there is no room for them."""
        path, size = self.path(shard_hash), rows.numel() * rows.element_size()
        if path.exists():
            return True
        if self._bytes + size > self._max_bytes:
            return False
        with staging(self._folder) as room:
            made = room / path.name
            save_file({"features": rows.contiguous()}, made)
            put_in_place(made, path)
        self._bytes += size
        return True
