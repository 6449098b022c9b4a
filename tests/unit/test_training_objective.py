"""What is trained: which blocks, what they see, what a slot counts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from draft_service.masks import LayerMask, attention_mask
from draft_service.network import folded_attention
from drafter_training.acceptance import agreed, every_draft, walk, walk_tau
from drafter_training.block_attention import attend_in_blocks
from drafter_training.blocks import BlockRule, Blocks, cut_blocks, every_block, sample_blocks
from drafter_training.dataset import Batch
from drafter_training.drafter import target_head
from drafter_training.loss import LossRule, slot_weights, usual_gamma
from drafter_training.packing import denoise, of_own_block, run_sparse, sparse_mask
from drafter_training.studies import posterior_noise, second_pass
from drafter_training.variants import FusedInputNetwork
from tests.unit.training_support import (
    BLOCK,
    HIDDEN,
    RULE,
    VOCABULARY,
    make_dataset,
    make_network,
    tiny_llama,
)


def batch_of(tokens: torch.Tensor, lengths: list[int], prompts: list[int]) -> Batch:
    rows, length = tokens.shape
    generator = torch.Generator().manual_seed(3)
    return Batch(
        tokens,
        torch.tensor(lengths),
        torch.tensor(prompts),
        torch.randn(rows, length, 2 * HIDDEN, generator=generator),
        torch.randn(rows, length, HIDDEN, generator=generator),
    )


def test_block_sees_exactly_the_context_before_its_anchor_and_itself() -> None:
    target = tiny_llama()
    network, embedding = make_network(target), target.get_input_embeddings().weight
    positions = torch.tensor([[[4, 5, 6, 7], [8, 9, 10, 11]]])
    given = batch_of(torch.randint(VOCABULARY, (1, 12)), [12], [2])
    tokens = torch.randint(VOCABULARY, (1, 2, BLOCK))

    def run(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        blocks = Blocks(positions[..., 0], torch.ones(1, 2) > 0, tokens, positions, tokens[..., 1:])
        batch = Batch(given.tokens, given.lengths, given.prompt_lengths, features, features)
        with torch.no_grad():
            return denoise(network, batch, embedding, blocks)[0]

    def changed(features: torch.Tensor, tokens: torch.Tensor) -> list[bool]:
        return [not torch.equal(a, b) for a, b in zip(run(features, tokens), plain, strict=True)]

    plain = run(given.features, tokens)
    for place in range(12):
        other = given.features.clone()
        other[0, place] += 1
        assert changed(other, tokens) == [place < 4, place < 8]
    for block in range(2):
        for slot in range(BLOCK):
            other_tokens = tokens.clone()
            other_tokens[0, block, slot] = (other_tokens[0, block, slot] + 1) % VOCABULARY
            assert changed(given.features, other_tokens) == [block == 0, block == 1]


@pytest.mark.parametrize(
    "kind", [LayerMask(), LayerMask(True), LayerMask(False, 5), LayerMask(True, 3)]
)
def test_the_sparse_mask_is_the_draft_services(kind: LayerMask) -> None:
    anchors = torch.tensor([[9, 3, 7], [4, 12, 5]])
    positions = (anchors[..., None] + torch.arange(BLOCK)).flatten(1)
    owners = anchors.repeat_interleave(BLOCK, 1)
    context = 12
    places = torch.arange(context).expand(2, -1)
    dense = attention_mask(kind, positions, places, owners)
    sparse = sparse_mask(kind, positions, context, owners)
    rows, queries = positions.shape
    seen = torch.tensor(
        [
            [
                [
                    bool(sparse.mask_mod(*(torch.tensor(i) for i in (row, 0, query, key))))
                    for key in range(context + queries)
                ]
                for query in range(queries)
            ]
            for row in range(rows)
        ]
    )
    assert torch.equal(seen, dense)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_attention_gives_the_states_of_the_dense_mask() -> None:
    target = tiny_llama()
    network, embedding = make_network(target), target.get_input_embeddings().weight
    batch = batch_of(torch.randint(VOCABULARY, (2, 20)), [20, 14], [5, 4])
    blocks = sample_blocks(batch, RULE, torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense = denoise(network, batch, embedding, blocks)
        features = batch.features[:, : int(blocks.anchors.max())]
        places = torch.arange(features.shape[1]).expand(2, -1)
        sparse = run_sparse(
            network,
            network.embed(blocks.tokens.flatten(1), embedding),
            blocks.positions.flatten(1),
            network.context_kv(network.context_states(features), places),
            blocks.anchors.repeat_interleave(BLOCK, 1),
            attention=flex_attention,
        )
    torch.testing.assert_close(sparse.view_as(dense), dense, rtol=1e-4, atol=1e-5)


def test_a_device_without_attention_of_its_own_gets_a_dense_mask() -> None:
    """As Apple's; PyTorch's meta device stands for it, on which only shapes are computed."""
    target = tiny_llama()
    network, embedding = make_network(target), target.get_input_embeddings().weight
    batch = batch_of(torch.randint(VOCABULARY, (2, 20)), [20, 14], [5, 4])
    blocks = sample_blocks(batch, RULE, torch.Generator().manual_seed(0))
    hidden = denoise(network.to("meta"), batch, embedding.to("meta"), blocks)
    assert hidden.shape == (*blocks.tokens.shape, HIDDEN)


@pytest.mark.parametrize(
    "kind",
    [LayerMask(), LayerMask(is_causal=True), LayerMask(window=3), LayerMask(True, 6)],
    ids=str,
)
def test_attention_block_by_block_is_that_of_the_dense_mask(kind: LayerMask) -> None:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    q, own_keys, own_values = draw(2, 20, 6, 8), draw(2, 20, 2, 8), draw(2, 20, 2, 8)
    keys, values = draw(2, 2, 30, 8), draw(2, 2, 30, 8)
    given = (q, keys, values, own_keys, own_values)
    starts = torch.tensor([[9, 3, 25, 1, 14], [2, 8, 20, 11, 29]])
    positions = (starts[..., None] + torch.arange(4)).flatten(1)
    anchors, places = starts.repeat_interleave(4, 1), torch.arange(30).expand(2, -1)
    mask = attention_mask(kind, positions, places, anchors)
    assert mask is not None
    joined = [
        torch.cat([of_context, own.transpose(1, 2)], 2)
        for of_context, own in ((keys, own_keys), (values, own_values))
    ]
    dense = folded_attention(q, *joined, mask)
    split = attend_in_blocks(*given, of_own_block(mask, 30, 4))
    torch.testing.assert_close(split, dense, rtol=1e-5, atol=1e-5)
    toward = torch.randn(dense.shape, generator=generator)
    wanted = torch.autograd.grad(dense, given, toward)
    for ours, theirs in zip(torch.autograd.grad(split, given, toward), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_anchors_lie_inside_the_answer_and_labels_are_the_tokens_after_them() -> None:
    batch = batch_of(torch.arange(40).view(2, 20), [20, 12], [5, 9])
    rule = BlockRule(BLOCK, 99, anchors=50)
    blocks = sample_blocks(batch, rule, torch.Generator().manual_seed(0))
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


def test_fixed_anchors_stand_at_the_answers_every_fourth_token() -> None:
    batch = batch_of(torch.arange(20).view(1, 20), [20], [5])
    rule = BlockRule(BLOCK, 99, anchors=50, kind="fixed")
    blocks = sample_blocks(batch, rule, torch.Generator().manual_seed(0))
    assert sorted(blocks.anchors[blocks.valid].tolist()) == [5, 9, 13, 17]


def test_a_share_of_passes_has_short_blocks_and_twice_as_many() -> None:
    rule = BlockRule(8, mask_token_id=1, anchors=3, short_share=0.75)
    drawn = [rule.drawn(torch.Generator().manual_seed(seed)) for seed in range(400)]
    short = [one for one in drawn if one.length == 4]
    assert {(one.length, one.anchors) for one in drawn} == {(8, 3), (4, 6)}
    assert 270 < len(short) < 330
    assert drawn == [rule.drawn(torch.Generator().manual_seed(seed)) for seed in range(400)]
    whole = BlockRule(8, mask_token_id=1, anchors=3)
    assert all(whole.drawn(torch.Generator().manual_seed(seed)) == whole for seed in range(40))
    with pytest.raises(ValueError, match="short blocks"):
        BlockRule(8, mask_token_id=1, anchors=3, short_share=1.5)


def test_slot_weights_follow_their_formulas() -> None:
    known = torch.tensor([[True, True, True], [True, False, False]])
    q = torch.tensor([[0.5, 0.2, 0.9], [0.4, 0.7, 0.7]])
    decay = slot_weights(LossRule("decay", gamma=2.0), q.log(), known)
    torch.testing.assert_close(decay[0], torch.tensor([1.0, math.exp(-0.5), math.exp(-1.0)]))
    assert decay[1].tolist() == [1.0, 0.0, 0.0]
    dpace = slot_weights(LossRule("dpace", alpha=0.5), q.log(), known)
    a, b, c = 0.75, 0.75 * 0.6, 0.75 * 0.6 * 0.95
    torch.testing.assert_close(dpace[0], torch.tensor([a + b + c, b + c, c]))
    torch.testing.assert_close(dpace[1], torch.tensor([0.7, 0.0, 0.0]))
    assert slot_weights(LossRule("flat"), q.log(), known).tolist() == [[1, 1, 1], [1, 0, 0]]
    assert [usual_gamma(16), usual_gamma(8)] == [7, 4]


@pytest.mark.parametrize("change", [{"distillation": 1.5}, {"gamma": 0.0}])
def test_a_loss_outside_its_limits_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        LossRule(**change)  # type: ignore[arg-type]


def test_walk_commits_every_token_once_and_never_too_many() -> None:
    accepted = [3, 0, 9, 9, 1, 0, 0, 0, 0]
    rounds = list(walk(accepted, 10))
    assert rounds == [(0, 4), (4, 2), (6, 1), (7, 1), (8, 1)]
    assert list(walk([7] * 9, 10)) == [(0, 8), (8, 1)]
    assert list(walk([], 1)) == []


def test_teacher_forced_rounds_are_those_of_drafting_one_block_at_a_time(tmp_path: Path) -> None:
    target = tiny_llama()
    dataset, network = make_dataset(tmp_path, target), make_network(target)
    head = target_head(target, torch.float32)
    batch = dataset.load([0, 1, 2])
    packed = walk_tau(network, batch, head, RULE)
    for row in range(3):
        place, rounds = 6, 0
        while place < 23:
            anchors = torch.tensor([[place]])
            one = Batch(
                batch.tokens[row : row + 1],
                batch.lengths[row : row + 1],
                batch.prompt_lengths[row : row + 1],
                batch.features[row : row + 1],
                batch.final_states[row : row + 1],
            )
            blocks = cut_blocks(one, RULE, anchors, anchors > 0)
            with torch.no_grad():
                hidden = denoise(network, one, head.embedding, blocks)[:, :, 1:]
            drafts = (hidden @ head.head.T).argmax(-1)
            place += min(int(agreed(drafts, blocks.labels)), 23 - place - 1) + 1
            rounds += 1
        assert (packed[row].tokens, packed[row].rounds) == (17, rounds)


def test_a_fused_input_sees_no_token_past_its_anchor(tmp_path: Path) -> None:
    target = tiny_llama()
    network = FusedInputNetwork(make_network(target).config)
    dataset = make_dataset(tmp_path, target)
    batch = dataset.load([0, 1])
    head = target_head(target, torch.float32)
    blocks = every_block(batch, RULE)
    past = batch.tokens.clone()
    past[:, 15:] = (past[:, 15:] + 1) % VOCABULARY
    changed = Batch(past, batch.lengths, batch.prompt_lengths, batch.features, batch.final_states)
    with torch.no_grad():
        one = denoise(network, batch, head.embedding, blocks)
        other = denoise(network, changed, head.embedding, blocks)
    # Anchors 6 to 15 see tokens before 15 alone (the blocks' own tokens are the same ones).
    assert torch.equal(one[:, :10], other[:, :10])
    assert not torch.equal(one[:, 11], other[:, 11])


def test_answers_of_unlike_lengths_share_a_batch_of_every_network() -> None:
    target = tiny_llama()
    batch = batch_of(torch.randint(VOCABULARY, (2, 20)), [20, 18], [5, 15])
    head = target_head(target, torch.float32)
    for network in (make_network(target), FusedInputNetwork(make_network(target).config)):
        taus = walk_tau(network, batch, head, RULE)
        assert [tau.tokens for tau in taus] == [14, 2]


def test_posterior_noise_makes_the_known_choice_and_is_gumbel() -> None:
    log_probs = torch.tensor([0.6, 0.3, 0.1]).log().expand(200_000, -1).contiguous()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.multinomial(log_probs[0].exp(), len(log_probs), True, generator=generator)
    noise = posterior_noise(log_probs, chosen, generator)
    assert torch.equal((log_probs + noise).argmax(-1), chosen)
    # Over choices drawn from p it is plain Gumbel noise: mean 0.5772, variance pi^2 / 6.
    torch.testing.assert_close(noise.mean(0), torch.full((3,), 0.5772), rtol=0, atol=0.02)
    torch.testing.assert_close(noise.var(0), torch.full((3,), 1.6449), rtol=0, atol=0.05)


def test_a_second_pass_keeps_what_it_is_told_to_keep(tmp_path: Path) -> None:
    target = tiny_llama()
    dataset, network = make_dataset(tmp_path, target), make_network(target)
    head = target_head(target, torch.float32)
    batch = dataset.load([0, 1])
    blocks, drafts = every_draft(network, batch, head, RULE)
    all_kept = second_pass(network, batch, head, blocks, drafts, BLOCK - 1)
    assert torch.equal(all_kept, agreed(drafts, blocks.labels))
    right = torch.where(blocks.labels >= 0, blocks.labels, drafts)
    assert (
        second_pass(network, batch, head, blocks, right, 1) >= (blocks.labels[..., 0] >= 0)
    ).all()
