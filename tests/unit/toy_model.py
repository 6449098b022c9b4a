"""The toy model of the gateway's tests: one hash, over the tiny byte-level tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashduet.v1.common_pb2 import PositionLogprobs, SamplingParams, TokenLogprob
from tests.support.tiny import IM_END, SPECIALS, tiny_tokenizer

CONTEXT_WINDOW = 512


def tokenizer_folder(folder: Path) -> Path:
    """The tiny byte-level tokenizer, ending at <|im_end|>."""
    tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END}))
    return folder


def ids_of(text: str) -> list[int]:
    """One token a byte, as the tiny tokenizer has them (no merges)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    order = {c: i for i, c in enumerate(sorted(characters.values()))}
    return [len(SPECIALS) + order[characters[byte]] for byte in text.encode()]


def toy_token(ids: Sequence[int], sampling: SamplingParams, choice: int = 0) -> int:
    """The toy model: a byte token that depends on the last ids, the position and the noise key."""
    key = [*ids[-3:], len(ids)]
    if sampling.temperature > 0:
        key += [sampling.seed & 0xFFFFFFFF, sampling.seed >> 32, choice]
    # Not a checksum: those of two seeds differ by the same amount at every position, so that one
    # pair in 256 would give the same answer.
    (byte,) = hashlib.blake2b(repr(key).encode(), digest_size=1).digest()
    return len(SPECIALS) + byte


def plain_answer(
    prompt: Sequence[int], tokens: int, seed: int | None = None, choice: int = 0
) -> list[int]:
    """What the toy target alone says."""
    sampling = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed or 0)
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(toy_token(ids, sampling, choice))
    return ids[len(prompt) :]


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class ToySession:
    ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    drafting: bool
    choice: int = 0
    top_logprobs: int | None = None
    stop_ids: frozenset[int] = frozenset()


def toy_logprobs(ids: Sequence[int], top_logprobs: int | None) -> list[PositionLogprobs]:
    """What the toy target tells: -1/2 for what it chose, then ever less likely special tokens."""
    if top_logprobs is None:
        return []
    top = [TokenLogprob(token_id=i, logprob=-1.0 - i) for i in range(top_logprobs)]
    return [
        PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.5), top=top)
        for token_id in ids
    ]
