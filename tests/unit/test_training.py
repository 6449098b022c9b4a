"""What the drafter's training promises, on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from draft_service.checkpoint import load_drafter
from draft_service.config import DrafterConfig
from draft_service.network import DFlashNetwork
from drafter_training.checkpoint import drafter_config, save_drafter, warm_start
from drafter_training.data import DataSettings, ShardWriter, repeats_itself
from drafter_training.dataset import Batch, ShardDataset
from drafter_training.evaluate import decode_speculatively
from drafter_training.objective import Blocks, Objective, ObjectiveSettings, denoise, sample_blocks
from drafter_training.prompts import HeldOutPromptsError, read_user_turns
from drafter_training.slot_decoder import SlotDecoder
from drafter_training.trainer import Trainer, TrainSettings

VOCABULARY, HIDDEN, BLOCK, TAPS = 64, 32, 4, [0, 1]


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_network(target: LlamaForCausalLM) -> DFlashNetwork:
    torch.manual_seed(1)
    config = drafter_config(
        target, layers=2, block_size=BLOCK, mask_token_id=3, target_layer_ids=TAPS
    )
    network = DFlashNetwork(DrafterConfig.from_qwen3(config))
    warm_start(network, target, [0, 2], 1)
    return network


def make_data(folder: Path) -> ShardDataset:
    generator = torch.Generator().manual_seed(2)
    writer = ShardWriter(folder, DataSettings(target_layer_ids=TAPS))
    for _ in range(10):
        ids = torch.randint(VOCABULARY, (24,), generator=generator).tolist()
        features = torch.randn(24, 3 * HIDDEN, generator=generator).bfloat16()
        assert writer.add(ids, 6, True, features)
    writer.flush(next_turn=0, force=True)
    return ShardDataset([folder], HIDDEN)


def test_block_sees_exactly_the_context_before_its_anchor_and_itself(
    target: LlamaForCausalLM,
) -> None:
    network = make_network(target)
    embedding = target.get_input_embeddings().weight
    features = torch.randn(1, 12, 2 * HIDDEN)
    positions = torch.tensor([[[4, 5, 6, 7], [8, 9, 10, 11]]])
    tokens = torch.randint(VOCABULARY, (1, 2, BLOCK))

    def run(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        blocks = Blocks(positions[..., 0], torch.ones(1, 2) > 0, tokens, positions, tokens[..., 1:])
        with torch.no_grad():
            return denoise(network, features, embedding, blocks)[0]

    def changed(features: torch.Tensor, tokens: torch.Tensor) -> list[bool]:
        return [not torch.equal(a, b) for a, b in zip(run(features, tokens), plain, strict=True)]

    plain = run(features, tokens)
    for place in range(12):
        other = features.clone()
        other[0, place] += 1
        assert changed(other, tokens) == [place < 4, place < 8]
    for block in range(2):
        for slot in range(BLOCK):
            other_tokens = tokens.clone()
            other_tokens[0, block, slot] = (other_tokens[0, block, slot] + 1) % VOCABULARY
            assert changed(features, other_tokens) == [block == 0, block == 1]


def test_anchors_lie_inside_the_answer_and_labels_are_the_tokens_after_them() -> None:
    batch = Batch(
        torch.arange(40).view(2, 20),
        torch.tensor([20, 12]),
        torch.tensor([5, 9]),
        torch.zeros(2, 20, 4),
        torch.zeros(2, 20, 2),
    )
    blocks = sample_blocks(
        batch,
        count=50,
        block_length=BLOCK,
        mask_token_id=99,
        generator=torch.Generator().manual_seed(0),
    )
    assert sorted(blocks.anchors[0][blocks.valid[0]].tolist()) == list(range(5, 19))
    assert sorted(blocks.anchors[1][blocks.valid[1]].tolist()) == [9, 10]
    assert (blocks.tokens[..., 1:] == 99).all()
    for row, length in enumerate([20, 12]):
        for anchor, labels in zip(blocks.anchors[row], blocks.labels[row], strict=True):
            inside = [int(anchor) + 1 + k < length for k in range(BLOCK - 1)]
            known = bool(blocks.valid[row][blocks.anchors[row] == anchor][0])
            expected = [
                20 * row + int(anchor) + 1 + k if ok and known else -1
                for k, ok in enumerate(inside)
            ]
            assert labels.tolist() == expected


def test_resumed_run_equals_unbroken_run(target: LlamaForCausalLM, tmp_path: Path) -> None:
    dataset = make_data(tmp_path / "data")
    embedding = target.get_input_embeddings().weight.detach()
    settings = TrainSettings(epochs=3, batch_size=3, held_out=2, learning_rate=1e-2)

    def trainer(folder: Path) -> Trainer:
        objective = Objective(
            embedding,
            embedding,
            dataset.token_counts(VOCABULARY),
            ObjectiveSettings(anchors=4, common_tokens=16, random_tokens=8),
        )
        config = drafter_config(
            target, layers=2, block_size=BLOCK, mask_token_id=3, target_layer_ids=TAPS
        )
        return Trainer(make_network(target), config, objective, dataset, folder, settings)

    unbroken = trainer(tmp_path / "unbroken")
    unbroken.run()
    trainer(tmp_path / "resumed").run(stop_after_steps=4)
    resumed = trainer(tmp_path / "resumed")
    assert resumed.step == 4
    resumed.run()

    assert resumed.step == unbroken.step == 9
    start = make_network(target).state_dict()
    for name, weight in unbroken.network.state_dict().items():
        assert torch.equal(weight, resumed.network.state_dict()[name]), name
    assert not torch.equal(start["fc.weight"], unbroken.network.state_dict()["fc.weight"])


def test_saved_keys_are_exactly_the_zlab_set(target: LlamaForCausalLM, tmp_path: Path) -> None:
    network = make_network(target)
    config = drafter_config(
        target, layers=2, block_size=BLOCK, mask_token_id=3, target_layer_ids=TAPS
    )
    save_drafter(tmp_path, network, config)
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == expected
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": TAPS}
    assert load_drafter(tmp_path).config.block_length == BLOCK


def test_evaluation_prompts_are_refused_by_name(tmp_path: Path) -> None:
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text('{"turns": ["What is held out?"]}\n')
    with pytest.raises(HeldOutPromptsError, match=r"dev\.jsonl"):
        read_user_turns(held_out)
    allowed = held_out.rename(tmp_path / "train.jsonl")
    assert read_user_turns(allowed) == ["What is held out?"]


def test_duplicate_prompts_are_kept_once(tmp_path: Path) -> None:
    settings = DataSettings(target_layer_ids=TAPS)
    writer = ShardWriter(tmp_path, settings)
    ids, features = list(range(20)), torch.zeros(20, 3 * HIDDEN).bfloat16()
    assert writer.add(ids, 5, True, features)
    assert not writer.add([*ids[:5], *range(30, 45)], 5, True, features)
    writer.flush(next_turn=7, force=True)
    again = ShardWriter(tmp_path, settings)
    assert again.manifest["next_turn"] == 7
    assert not again.add(ids, 5, True, features)


def test_only_a_repeating_tail_counts_as_a_loop() -> None:
    assert repeats_itself(list(range(40)) + [1, 2, 3] * 12)
    assert not repeats_itself(list(range(80)))
    assert not repeats_itself([7, 8] * 5)


def test_slots_decode_what_generate_decodes(target: LlamaForCausalLM) -> None:
    prompts = [[5, 9, 11], [4, 30, 2, 17, 8]]
    plain = [
        target.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        for p in prompts
    ]
    decoder = SlotDecoder(target, TAPS, num_slots=2, max_length=32)
    rows = [[*p, int(decoder.prefill(i, p).argmax())] for i, p in enumerate(prompts)]
    for _ in range(7):
        logits = decoder.step(
            torch.tensor([row[-1] for row in rows]), torch.tensor([len(row) - 1 for row in rows])
        )
        rows = [[*row, int(line.argmax())] for row, line in zip(rows, logits, strict=True)]
    assert rows == [p[0].tolist() for p in plain]


def test_speculative_decoding_equals_plain_decoding(target: LlamaForCausalLM) -> None:
    prompt = [5, 9, 11, 40]
    plain = target.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    for verify_length in (1, 2, BLOCK):
        decoded = decode_speculatively(
            target,
            make_network(target),
            prompt,
            max_tokens=20,
            stop=set(),
            verify_length=verify_length,
        )
        assert decoded.token_ids == plain[0, len(prompt) :].tolist()
        assert sum(decoded.rounds) == 19
