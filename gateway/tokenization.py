"""The served model's tokenizer: prompts in, detokenizers out, and where its answers end.

Transformers' AutoTokenizer is used because a prompt's ids must be those that any user of the model
gets. It does not need torch; `gateway.__main__` keeps torch out of the process.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from flashduet.errors import CheckpointError, InvalidRequest
from gateway.text import REPLACEMENT, ByteDetokenizer, Detokenizer, WindowDetokenizer

# Longer texts are tokenized in a thread, so that other requests' rounds go on meanwhile.
_THREAD_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json says about sampling; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


class Tokenizer:
    """A checkpoint folder's tokenizer, chat template and end-of-sequence ids."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: the folder has no readable tokenizer.
        """
        self._tokenizer = _load(folder)
        # The Rust tokenizer itself; None where a model brings a tokenizer in Python.
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        self._byte_level = _is_byte_level(self._backend)
        self._special_ids = self._find_special_ids()
        vocabulary = self._tokenizer.get_vocab()
        # No text shorter than its token count times this can be told from its length alone.
        self.longest_token = max(map(len, vocabulary), default=1)
        self._byte_ids = {
            token_id
            for token, token_id in vocabulary.items()
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        }
        self._ordinary_id = next(
            (i for i in sorted(vocabulary.values()) if i not in self._special_ids | self._byte_ids),
            0,
        )
        self.end_ids = _end_ids(folder, self._tokenizer.eos_token_id)
        self.defaults = _generation_defaults(folder)
        # Not a template's variables: what the method that renders it takes for itself.
        self._reserved = {"messages", *signature(self._tokenizer.apply_chat_template).parameters}
        self._token_bytes = _TokenBytes(self._bytes_of)
        self._make_detokenizer = self._detokenizer_kind()

    async def encode_text(self, text: str) -> list[int]:
        """Ids of a text, with whatever the tokenizer puts around it (e.g. a BOS)."""
        return await self._encode(text, add_special_tokens=True)

    async def encode_chat(
        self, turns: Sequence[ChatTurn], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Ids of the chat as `render_chat` writes it.

        Raises:
            InvalidRequest: see `render_chat`.
        """
        return await self._encode(self.render_chat(turns, variables), add_special_tokens=False)

    def render_chat(
        self, turns: Sequence[ChatTurn], variables: Mapping[str, object] | None = None
    ) -> str:
        """The chat as the model's template writes it, the answer's opening included.

        Args:
            turns: at least one.
            variables: more of the template's, by name.

        Raises:
            InvalidRequest: there is no template, it refuses the chat, or a variable has the name of
                one that is not the caller's to set.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "messages", "chat messages", "the served model has no chat template; send text"
            )
        for name in variables or ():
            if name in self._reserved:
                raise InvalidRequest(
                    f"template_kwargs.{name}", "a value", "is not a variable of the template"
                )
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(variables or {})
            )
        except Exception as error:  # A template is a program; whatever it raises is its refusal.
            raise InvalidRequest(
                "messages",
                [turn.role for turn in turns],
                f"refused by the model's chat template: {error}",
            ) from error

    def detokenizer(self, *, include_special_tokens: bool) -> Detokenizer:
        """A new one for one answer."""
        return self._make_detokenizer(include_special_tokens)

    def decode(self, token_ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """Text of all the ids at once, which a detokenizer's pieces must add up to."""
        ids = list(token_ids)
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=not include_special_tokens)
        return self._tokenizer.decode(
            ids,
            skip_special_tokens=not include_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, a special one included; empty for an id that there is not.

        Exact where tokens are strings of bytes, which may be a part of a character.
        """
        return self._token_bytes[token_id]

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        def encode() -> list[int]:
            return list(
                self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            )

        return encode() if len(text) <= _THREAD_CHARACTERS else await asyncio.to_thread(encode)

    def _token_of(self, token_id: int) -> str | None:
        if self._backend is not None:
            return self._backend.id_to_token(token_id)
        # A tokenizer in Python makes something up for an id that it does not have.
        return self._tokenizer.convert_ids_to_tokens(token_id) if token_id >= 0 else None

    def _find_special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self._tokenizer.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _detokenizer_kind(self) -> Callable[[bool], Detokenizer]:
        if self._byte_level:
            special, whole = self._special_ids, self._token_bytes
            plain = _TokenBytes(lambda token_id: b"" if token_id in special else whole[token_id])
            return lambda include: ByteDetokenizer(whole if include else plain)
        return self._window_detokenizer

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _token_bytes(token)
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        # A text's first token may lose its space: after another one it shows whole.
        before = self.decode([self._ordinary_id], include_special_tokens=True)
        both = self.decode([self._ordinary_id, token_id], include_special_tokens=True)
        return both.removeprefix(before).encode()

    def _window_detokenizer(self, include_special_tokens: bool) -> Detokenizer:
        special = frozenset() if include_special_tokens else self._special_ids
        exact_bytes = self._backend is not None

        def skipped(token_id: int) -> bool:
            return token_id in special or (
                self._backend is not None and self._backend.id_to_token(token_id) is None
            )

        def may_change(last_id: int, text: str) -> bool:
            # The library decodes a run of <0xNN> tokens as a whole, all of it broken if one byte
            # is, so only its end settles it. Tokenizers of unknown make are only known to have
            # broken off inside a character.
            return last_id in self._byte_ids or (not exact_bytes and text.endswith(REPLACEMENT))

        return WindowDetokenizer(
            lambda ids: self.decode(ids, include_special_tokens=True),
            skipped=skipped,
            may_change=may_change,
        )


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token of a vocabulary, worked out when first asked for."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._bytes_of(token_id)
        return found


def _is_byte_level(backend: Any) -> bool:
    """Whether the vocabulary's tokens are strings of bytes (None: a tokenizer in Python)."""
    decoder = backend.decoder if backend is not None else None
    return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"


def _byte_alphabet() -> Mapping[str, int]:
    """Byte-level BPE writes each byte as one printable character; this reads them back.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """Like the library's ByteLevel decoder: a token with any other character is its own UTF-8."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _load(folder: Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(f"{folder}: no readable tokenizer: {error}") from error


def _end_ids(folder: Path, tokenizer_end_id: int | None) -> frozenset[int]:
    """Where Transformers' own `generate` would end: the generation config, else the config."""
    config = _json(folder / "config.json")
    for source in (_json(folder / "generation_config.json"), config, config.get("text_config", {})):
        found = source.get("eos_token_id")
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset() if tokenizer_end_id is None else frozenset([tokenizer_end_id])


def _generation_defaults(folder: Path) -> GenerationDefaults:
    stated = _json(folder / "generation_config.json")
    return GenerationDefaults(
        temperature=stated.get("temperature"),
        top_p=stated.get("top_p"),
        top_k=stated.get("top_k"),
        min_p=stated.get("min_p"),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
