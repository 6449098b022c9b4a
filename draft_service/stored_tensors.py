"""A checkpoint's tensors by the network's names, under whatever names they were stored.

Trainers join projections of one input, put everything under a prefix, or write a codebook as the
module that holds it. Which stored tensors were never asked for is known in the end, so that one
that belongs to another architecture is not passed over.
"""

from __future__ import annotations

import re

from torch import Tensor

from draft_service.config import DrafterConfig
from draft_service.tensor_files import TensorFiles
from flashduet.errors import CheckpointError

_PREFIXES = ("", "model.", "draft_model.")
# Never needed: tables of the rotary embedding, and what only training compares with.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.|verifier_norm\.|verifier_lm_head\.)")
_JOINED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class StoredTensors:
    """Tensors of one folder for a network of `config`."""

    def __init__(self, files: TensorFiles, config: DrafterConfig) -> None:
        self._files = files
        self._prefix = next(
            (p for p in _PREFIXES if p + "fc.weight" in files),
            "",
        )
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        self._rows = {
            "q_proj": slice(0, q),
            "k_proj": slice(q, q + kv),
            "v_proj": slice(q + kv, q + 2 * kv),
            "gate_proj": slice(0, inner),
            "up_proj": slice(inner, 2 * inner),
        }
        self._totals = {"qkv_proj": q + 2 * kv, "gate_up_proj": 2 * inner}
        self._used: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the network.

        Raises:
            CheckpointError: it is missing, or of another shape or type.
        """
        for stored in (name, f"{name}.weight"):
            if (found := self.find(stored)) is not None:
                return self._files.read(found, shape)
        *_, part, kind = name.split(".")
        joined = name.replace(part, _JOINED[part]) if part in _JOINED else None
        if joined is not None and (found := self.find(joined)) is not None:
            rows = (self._totals[_JOINED[part]],)
            whole = self._files.read(found, rows + shape[1:] if kind == "weight" else rows)
            return whole[self._rows[part]]
        return self._files.read(self._prefix + name, shape)  # says that it is missing

    def optional(self, *names: str) -> Tensor | None:
        """The first of these that is there, of whatever type and shape."""
        for name in names:
            if (found := self.find(name)) is not None:
                return self._files.read_any(found)
        return None

    def find(self, name: str) -> str | None:
        """The name that a tensor is stored under, or None; it counts as used."""
        for stored in (self._prefix + name, name):
            if stored in self._files:
                self._used.add(stored)
                return stored
        return None

    def shown(self, name: str) -> str:
        """`folder/file: tensor`, for messages."""
        return self._files.shown(self.find(name) or name)

    def refuse_others(self, expected: int, num_layers: int) -> None:
        """Raises CheckpointError if the folder has tensors that nobody asked for."""
        others = [
            name
            for name in self._files.names
            if name not in self._used and not _IGNORED.search(name)
        ]
        if others:
            raise CheckpointError(
                f"{self._files.shown(others[0])}: expected only the {expected} tensors of a "
                f"{num_layers}-layer drafter, found this one besides (and {len(others) - 1} "
                "others); the checkpoint is of another architecture"
            )
