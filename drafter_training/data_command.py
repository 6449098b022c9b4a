"""Making a folder of token shards, from settings to the last shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from drafter_training.feature_cache import FeatureCache
from drafter_training.generation import AnswerGenerator, DataSettings
from drafter_training.passages import Passages
from drafter_training.prompts import PromptSource, read_user_turns
from drafter_training.shards import ShardFolder
from drafter_training.slot_decoder import SlotDecoder
from drafter_training.target import load_target, load_tokenizer, target_hash
from flashduet.errors import ConfigurationError
from flashduet.packed_linear import can_pack, pack_linears


def data_facts(target: str, dtype: torch.dtype, settings: DataSettings) -> dict[str, Any]:
    """What the manifest says the data come from; as JSON gives it back."""
    facts = {"target": target, "dtype": str(dtype).removeprefix("torch."), **asdict(settings)}
    facts = {key: value for key, value in facts.items() if value is not None}
    return dict(json.loads(json.dumps(facts)))


def with_prompt_files(settings: DataSettings, files: list[Path]) -> DataSettings:
    """The settings with the files' hashes: a file may move, but not change, under a folder."""
    hashes = tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return replace(settings, prompt_files=hashes, file_share=settings.file_share if files else 0.0)


def make_data(
    target_folder: Path,
    folder: Path,
    settings: DataSettings,
    *,
    prompt_files: list[Path],
    answer_tokens: int,
    seconds: float = float("inf"),
    slots: int = 64,
    cache: FeatureCache | None = None,
    layer_ids: list[int] | None = None,
    passages_from: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    report: Callable[[int], None] = lambda _: None,
) -> ShardFolder:
    """Generates until the folder holds ``answer_tokens``; what is there and whole is kept.

    Args:
        cache, layer_ids: keep the features seen on the way, so that they need not be recomputed.
        passages_from: a folder of shards whose answers become the passages of long prompts.
        report: told the folder's answer tokens.
    """
    settings = with_prompt_files(settings, prompt_files)
    if settings.max_answer_tokens >= settings.max_length:
        raise ConfigurationError(
            f"max answer tokens: {settings.max_answer_tokens} given, "
            f"less than the length {settings.max_length} expected"
        )
    turns = [turn for path in prompt_files for turn in read_user_turns(path)]
    shards = ShardFolder(folder, data_facts(target_hash(target_folder), dtype, settings))
    report(shards.answer_tokens)
    if shards.answer_tokens >= answer_tokens:
        return shards
    tokenizer = load_tokenizer(target_folder)
    passages = Passages.read(ShardFolder(passages_from), tokenizer) if passages_from else None
    source = PromptSource(tokenizer, turns, settings.file_share, settings.seed, passages)
    model = load_target(target_folder, dtype)
    keep = bool(cache and layer_ids)
    decoder = SlotDecoder(model, layer_ids or [] if keep else [], slots, settings.max_length)
    if can_pack(dtype, torch.device("cpu")):
        pack_linears(model, lambda: decoder.prefill(0, [0, 1]))
    sink = cache.keep if keep and cache else None
    generator = AnswerGenerator(decoder, tokenizer, settings, shards, source, sink)
    generator.run(answer_tokens, seconds, report)
    return shards
