"""What the training data promise: resumable, without duplicates, whole or made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter_training import generation
from drafter_training.data_command import make_data
from drafter_training.feature_cache import FeatureCache
from drafter_training.features import FeatureSource, compute_features
from drafter_training.generation import DataSettings, repeats_itself
from drafter_training.passages import Passages
from drafter_training.prompts import HeldOutPromptsError, PromptSource, read_user_turns
from drafter_training.shards import ShardError, ShardFolder
from drafter_training.slot_decoder import SlotDecoder
from drafter_training.target import load_tokenizer, target_hash
from tests.support.tiny import tiny_target
from tests.unit.training_support import TAPS, make_dataset, random_sequences, tiny_llama

SETTINGS = DataSettings(
    file_share=0.0,
    max_answer_tokens=16,
    max_length=160,
    shard_sequences=4,
    user_temperatures=(1.0,),
)
Make = Callable[..., ShardFolder]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make(target_folder: Path, tmp_path: Path) -> Make:
    def run(
        answer_tokens: int, settings: DataSettings = SETTINGS, **options: object
    ) -> ShardFolder:
        return make_data(
            target_folder,
            tmp_path / "data",
            settings,
            answer_tokens=answer_tokens,
            slots=4,
            dtype=torch.float32,
            **{"prompt_files": [], **options},  # type: ignore[arg-type]
        )

    return run


def test_a_broken_shard_is_detected_and_made_again(make: Make) -> None:
    first = make(150)
    whole = {number: first.read(number) for number in first.numbers}
    assert len(whole) >= 3
    damaged = bytearray(first.file(1).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    first.file(1).write_bytes(damaged)
    first.file(2).unlink()

    again = make(first.answer_tokens)
    assert again.broken == [1, 2]
    assert {number: again.read(number) for number in whole} == whole
    assert ShardFolder(again.path).broken == []


def test_a_second_run_adds_only_what_is_missing(make: Make) -> None:
    first = make(60)
    before = {number: first.file(number).stat().st_mtime_ns for number in first.numbers}
    second = make(first.answer_tokens + 60)
    assert len(second) > len(before)
    assert {n: second.file(n).stat().st_mtime_ns for n in before} == before


def test_no_prompt_is_answered_twice(make: Make, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"turns": ["again and again"]}\n' * 12)
    settings = DataSettings(**{**SETTINGS.__dict__, "file_share": 0.5})
    first = make(60, settings, prompt_files=[asked])
    shards = make(first.answer_tokens + 60, settings, prompt_files=[asked])
    prompts = [
        tuple(sequence.token_ids[: sequence.prompt_length])
        for number in shards.numbers
        for sequence in shards.read(number)
    ]
    assert len(shards) > len(first)
    assert len(set(prompts)) == len(prompts) > 4


def test_a_folder_is_not_mixed_with_other_settings(make: Make) -> None:
    make(20)
    with pytest.raises(ShardError, match="greedy_share"):
        make(40, DataSettings(**{**SETTINGS.__dict__, "greedy_share": 0.1}))


def test_features_kept_on_the_way_are_those_of_a_pass(
    make: Make, target_folder: Path, tmp_path: Path
) -> None:
    from drafter_training.target import load_target

    cache = FeatureCache(tmp_path / "features", target_hash(target_folder), TAPS, 1 << 24)
    shards = make(40, cache=cache, layer_ids=TAPS)
    target = load_target(target_folder, torch.float32)

    def never() -> torch.nn.Module:
        raise AssertionError("the cache has them")

    source = FeatureSource(TAPS, cache, never)  # type: ignore[arg-type]
    start = 0
    for sequence in shards.read(0):
        kept = source.rows(shards[0].sha256, start, sequence)
        computed = compute_features(target, TAPS, [sequence])[0]
        # The last token is never fed: no block sees its features.
        torch.testing.assert_close(kept[:-1].float(), computed[:-1], rtol=2e-2, atol=2e-2)
        start += len(sequence.token_ids)


def test_features_past_the_bound_are_computed_and_the_same(tmp_path: Path) -> None:
    target = tiny_llama()
    kept = make_dataset(tmp_path, target)
    cache = FeatureCache(tmp_path / "none", "tiny", TAPS, 0)
    source = FeatureSource(TAPS, cache, lambda: target)
    assert source.prepare([ShardFolder(tmp_path / "data")]) == 1
    assert not list((tmp_path / "none").iterdir())
    folder = ShardFolder(tmp_path / "data")
    for index, sequence in enumerate(folder.read(0)):
        rows = source.rows(folder[0].sha256, 24 * index, sequence)
        torch.testing.assert_close(
            rows[:, :-32], kept.load([index]).features[0], rtol=2e-2, atol=2e-2
        )


def test_evaluation_prompts_are_refused_by_name(tmp_path: Path) -> None:
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text('{"turns": ["What is held out?"]}\n')
    with pytest.raises(HeldOutPromptsError, match=r"dev\.jsonl"):
        read_user_turns(held_out)
    allowed = held_out.rename(tmp_path / "train.jsonl")
    assert read_user_turns(allowed) == ["What is held out?"]


def test_file_prompts_are_spread_and_each_is_used_once(target_folder: Path) -> None:
    tokenizer = load_tokenizer(target_folder)
    turns = [f"question number {n}" for n in range(8)]
    source = PromptSource(tokenizer, turns, 0.25, seed=0)
    texts = [tokenizer.decode(source.prompt(index).token_ids) for index in range(64)]
    used = [turn for text in texts for turn in turns if turn + "<|im_end|>" in text]
    assert sorted(used) == sorted(turns)
    assert sum(any(turn in text for turn in turns) for text in texts[:16]) == 4


def test_long_prompts_are_made_of_earlier_answers(target_folder: Path) -> None:
    tokenizer = load_tokenizer(target_folder)
    source = PromptSource(tokenizer, [], 0.0, 0, Passages(("alpha text", "beta text")))
    texts = [tokenizer.decode(source.prompt(index).token_ids) for index in range(20)]
    assert all("alpha text" in text or "beta text" in text for text in texts)


def test_only_a_repeating_tail_counts_as_a_loop() -> None:
    assert repeats_itself(list(range(40)) + [1, 2, 3] * 12)
    assert not repeats_itself(list(range(80)))
    assert not repeats_itself([7, 8] * 5)


@pytest.mark.parametrize("kept", [0, 24])
def test_of_a_loop_so_many_tokens_are_kept(
    make: Make, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "repeats_itself", lambda tokens: len(tokens) >= 16)
    settings = replace(SETTINGS, max_answer_tokens=64, loop_tokens=kept, greedy_share=1.0)
    folder = make(200, settings=settings)
    lengths = [s.answer_tokens for n in folder.numbers for s in folder.read(n)]
    assert max(lengths) == 16 + kept


def test_tokens_that_need_more_than_two_bytes_are_refused(tmp_path: Path) -> None:
    folder = ShardFolder(tmp_path, {})
    sequence = random_sequences(1)[0]
    with pytest.raises(ShardError, match="65536"):
        folder.write(0, [type(sequence)([*sequence.token_ids, 65536], 6, True)])


def test_slots_decode_what_generate_decodes() -> None:
    target = tiny_llama()
    prompts = [[5, 9, 11], [4, 30, 2, 17, 8]]
    plain = [
        target.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        for p in prompts
    ]
    decoder = SlotDecoder(target, [], num_slots=2, max_length=32)
    rows = [[*p, int(decoder.prefill(i, p).argmax())] for i, p in enumerate(prompts)]
    for _ in range(7):
        logits = decoder.step(
            torch.tensor([row[-1] for row in rows]), torch.tensor([len(row) - 1 for row in rows])
        )
        rows = [[*row, int(line.argmax())] for row, line in zip(rows, logits, strict=True)]
    assert rows == [p[0].tolist() for p in plain]
