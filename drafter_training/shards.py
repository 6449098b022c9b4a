"""Token shards: prompts and the target's own answers, two bytes a token, compressed.

A shard is a function of (settings, target, its number), so one that is missing or broken is simply
generated again, and a killed run loses only the shards that it had not finished.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from flashduet.models_cache import put_in_place

MANIFEST = "manifest.json"
FORMAT = 2
FEWEST_ANSWER_TOKENS = 8
_MAX_VOCABULARY = 1 << 16


class ShardError(ValueError):
    """A folder of shards does not fit what is asked of it."""


@dataclass(frozen=True)
class Sequence:
    """One prompt with its answer. greedy: how the answer was decoded."""

    token_ids: list[int]
    prompt_length: int
    greedy: bool

    @property
    def answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True)
class ShardFacts:
    """What the manifest says of a shard. sha256: of the file, in hex."""

    sha256: str
    sequences: int
    answer_tokens: int


def prompt_digest(token_ids: list[int]) -> bytes:
    """Key of a prompt for finding duplicates."""
    return hashlib.blake2b(torch.tensor(token_ids).numpy().tobytes(), digest_size=8).digest()


def pack(sequences: list[Sequence]) -> bytes:
    """Safetensors of uint16 tokens and int32 lengths, LZMA around it."""
    tokens = [token for sequence in sequences for token in sequence.token_ids]
    if tokens and max(tokens) >= _MAX_VOCABULARY:
        raise ShardError(f"token id {max(tokens)} does not fit two bytes (limit {_MAX_VOCABULARY})")
    arrays = {
        "tokens": torch.tensor(tokens, dtype=torch.uint16),
        "lengths": torch.tensor([len(s.token_ids) for s in sequences], dtype=torch.int32),
        "prompt_lengths": torch.tensor([s.prompt_length for s in sequences], dtype=torch.int32),
        "greedy": torch.tensor([s.greedy for s in sequences], dtype=torch.uint8),
    }
    return lzma.compress(save(arrays))


def unpack(data: bytes) -> list[Sequence]:
    """The inverse of `pack`."""
    arrays = load(lzma.decompress(data))
    tokens, start, sequences = arrays["tokens"].tolist(), 0, []
    columns = (arrays[name].tolist() for name in ("lengths", "prompt_lengths", "greedy"))
    for length, prompt, greedy in zip(*columns, strict=True):
        sequences.append(Sequence(tokens[start : start + length], prompt, bool(greedy)))
        start += length
    return sequences


class ShardFolder:
    """Owns a folder of shards: a shard counts once the manifest lists it with its hash."""

    def __init__(self, folder: Path, facts: dict[str, Any] | None = None) -> None:
        """facts: what made the data (target hash, settings); None to read a folder as it is."""
        self.path = folder
        self._shards: dict[int, ShardFacts] = {}
        self.broken: list[int] = []
        manifest = folder / MANIFEST
        if manifest.exists():
            self._read_manifest(json.loads(manifest.read_text()), facts)
        elif facts is None:
            raise ShardError(f"no {MANIFEST} in {folder}: it is no folder of token shards")
        else:
            self.facts = facts

    def _read_manifest(self, written: dict[str, Any], facts: dict[str, Any] | None) -> None:
        if written.get("format") != FORMAT:
            raise ShardError(f"{self.path}: shards of format {written.get('format')}, not {FORMAT}")
        self.facts = written["facts"]
        if facts is not None and facts != self.facts:
            keys = facts.keys() | self.facts.keys()
            key = min(k for k in keys if facts.get(k) != self.facts.get(k))
            raise ShardError(
                f"{self.path} was made with {key} = {self.facts.get(key)!r}, now it is "
                f"{facts.get(key)!r}; use another folder"
            )
        for number, shard in written["shards"].items():
            self._shards[int(number)] = ShardFacts(**shard)
        for number, shard in list(self._shards.items()):
            path = self.file(number)
            if not path.exists() or _sha256(path) != shard.sha256:
                del self._shards[number]
                self.broken.append(number)

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def numbers(self) -> list[int]:
        """Of the whole shards, ascending."""
        return sorted(self._shards)

    @property
    def answer_tokens(self) -> int:
        return sum(shard.answer_tokens for shard in self._shards.values())

    def __getitem__(self, number: int) -> ShardFacts:
        return self._shards[number]

    def keep_only(self, hashes: dict[str, str]) -> None:
        """Forgets all shards but these (number to SHA-256), which must be there and whole.

        A run over a folder that goes on growing keeps to the shards that it began with.
        """
        for name, digest in hashes.items():
            found = self._shards.get(int(name))
            if found is None or found.sha256 != digest:
                raise ShardError(f"{self.path}: shard {name} is missing or not the one it was")
        self._shards = {int(name): self._shards[int(name)] for name in hashes}

    def missing(self) -> int:
        """The lowest number that no whole shard has."""
        return next(number for number in range(len(self._shards) + 1) if number not in self._shards)

    def file(self, number: int) -> Path:
        return self.path / f"{number:05d}.safetensors.xz"

    def read(self, number: int) -> list[Sequence]:
        return unpack(self.file(number).read_bytes())

    def write(self, number: int, sequences: list[Sequence]) -> ShardFacts:
        """Data first, then the manifest, each by rename: a crash leaves a whole folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        data = pack(sequences)
        _replace(self.file(number), data)
        facts = ShardFacts(
            hashlib.sha256(data).hexdigest(),
            len(sequences),
            sum(sequence.answer_tokens for sequence in sequences),
        )
        self._shards[number] = facts
        manifest = {
            "format": FORMAT,
            "facts": self.facts,
            "answer_tokens": self.answer_tokens,
            "shards": {f"{n:05d}": asdict(self._shards[n]) for n in self.numbers},
        }
        _replace(self.path / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        return facts


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    put_in_place(temporary, path)
