"""Streams of real tokenizers of every make add up to the tokenizer's decode of the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flashduet.errors import CheckpointError, InvalidRequest
from gateway.text import ByteDetokenizer, WindowDetokenizer
from gateway.tokenization import ChatTurn, Tokenizer
from tests.support.tiny import IM_END, tiny_tokenizer
from tests.unit.toy_model import tokenizer_folder

TEXTS = [
    "Hello, world! How are you today?",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 🧑🏽‍🚀 astronaut",
    "你好世界，这是一个测试。日本語のテキスト",
    "नमस्ते दुनिया, यह एक परीक्षण है",
    "  leading and   inner  spaces \n\n\ttabs\n",
    "naïve café e\u0301 \u200b zero width",
]


def byte_level(folder: Path) -> Tokenizer:
    """Byte-level BPE, trained so that characters of other scripts are split over tokens."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    rust.train_from_iterator(TEXTS, trainer)
    # Added tokens that are not special, one with characters outside the byte alphabet.
    rust.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("é…x")])
    return saved(rust, folder)


def byte_fallback(folder: Path, *, metaspace: bool) -> Tokenizer:
    """SentencePiece as Llama 2, Mistral and Gemma have it: ▁ for spaces, <0xNN> for the rest."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdehlorwtis", "▁h", "he", "llo", "▁w", "or", "ld", "▁▁", "好", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("h", "e"), ("▁", "w"), ("o", "r"), ("▁", "▁")]
    rust = RustTokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if metaspace:
        rust.pre_tokenizer = pre_tokenizers.Metaspace()
        rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        rust.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        rust.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    return saved(rust, folder)


def saved(rust: RustTokenizer, folder: Path) -> Tokenizer:
    PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    def folder(name: str) -> Path:
        return Path(tmp_path_factory.mktemp(name))

    tiny = folder("tiny")
    tiny_tokenizer(tiny)
    return {
        "tiny": Tokenizer(tiny),
        "byte_level": byte_level(folder("byte_level")),
        "byte_fallback": byte_fallback(folder("byte_fallback"), metaspace=False),
        "metaspace": byte_fallback(folder("metaspace"), metaspace=True),
    }


KINDS = ["tiny", "byte_level", "byte_fallback", "metaspace"]


def stream(tokenizer: Tokenizer, groups: list[list[int]], include: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(include_special_tokens=include)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100)
def test_pieces_add_up_to_the_decode_of_the_whole(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Any ids, broken characters, special and unknown ones among them, in any grouping."""
    tokenizer = tokenizers[kind]
    one_id = st.one_of(st.integers(0, 340), st.integers(0, 10), st.integers(3, 258))
    ids = data.draw(st.lists(one_id, max_size=24))
    include = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=len(ids), max_size=len(ids)))
    groups, start = [], 0
    for size in sizes:
        groups.append(ids[start : start + size])
        start += size
    pieces = stream(tokenizer, groups, include)
    assert "".join(pieces) == tokenizer.decode(ids, include_special_tokens=include)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
async def test_text_comes_back_token_by_token_without_broken_characters(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = await tokenizer.encode_text(text)
    pieces = stream(tokenizer, [[token_id] for token_id in ids], include=False)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)
    if kind in ("tiny", "byte_level"):
        assert len([piece for piece in pieces if piece]) > 5, "it must stream, not wait for the end"


def test_the_exact_path_is_used_for_byte_level_and_the_window_for_others(
    tokenizers: dict[str, Tokenizer],
) -> None:
    kinds = {
        name: type(tokenizer.detokenizer(include_special_tokens=False))
        for name, tokenizer in tokenizers.items()
    }
    assert kinds["tiny"] is kinds["byte_level"] is ByteDetokenizer
    assert kinds["byte_fallback"] is kinds["metaspace"] is WindowDetokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
async def test_the_bytes_of_tokens_are_the_texts(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = await tokenizer.encode_text(text)
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
    # SentencePiece puts a space before a text, which is its first token's.
    assert spelled in (text, " " + text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_bytes_and_others_have_none(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.token_bytes(100_000) == b""
    special = min(tokenizer._special_ids)
    assert tokenizer.token_bytes(special) == tokenizer._backend.id_to_token(special).encode()
    if kind in ("byte_fallback", "metaspace"):
        vocabulary = tokenizer._backend.get_vocab()
        assert tokenizer.token_bytes(vocabulary["<0xE5>"]) == b"\xe5"
        assert tokenizer.token_bytes(vocabulary["▁h"]) == b" h"
        assert tokenizer.token_bytes(vocabulary["▁"]) == b" "
        assert tokenizer.token_bytes(vocabulary["h"]) == b"h"


def test_special_tokens_are_left_out_unless_asked_for(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tiny"]
    ids = [IM_END, *b"\x46", IM_END]
    assert "<|im_end|>" not in "".join(stream(tokenizer, [ids], include=False))
    assert "".join(stream(tokenizer, [ids], include=True)).count("<|im_end|>") == 2


async def test_prompts_have_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    tokenizer, reference = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "long " * 2000]:
        assert await tokenizer.encode_text(text) == reference(text)["input_ids"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    turns = [ChatTurn(turn["role"], turn["content"]) for turn in chat]
    assert await tokenizer.encode_chat(turns) == list(expected)


async def test_a_chat_that_the_template_cannot_take_is_the_clients_error(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match="no system role"):
        await Tokenizer(folder).encode_chat([ChatTurn("system", "x")])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        await Tokenizer(folder).encode_chat([ChatTurn("user", "x")])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 2]}, {"eos_token_id": 9}, {2, 3}),
        ({"eos_token_id": 3}, {}, {3}),
        ({}, {"eos_token_id": 9}, {9}),
        ({}, {"text_config": {"eos_token_id": [7]}}, {7}),
        (None, {}, {IM_END}),
    ],
)
def test_answers_end_where_generate_would_end_them(
    tmp_path: Path, generation: dict | None, config: dict, expected: set[int]
) -> None:
    folder = tokenizer_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is None:
        (folder / "generation_config.json").unlink()
    else:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer(folder).end_ids == expected


def test_sampling_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    stated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    defaults = Tokenizer(folder).defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.95, 20)
    assert defaults.min_p is None


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no readable tokenizer"):
        Tokenizer(tmp_path)
