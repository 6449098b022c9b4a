"""Acceptance length by real greedy decoding: draft, verify, accept, one sequence at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from draft_service.masks import attention_masks
from draft_service.network import DFlashNetwork


@dataclass(frozen=True)
class Decoded:
    """token_ids: what was emitted. rounds: tokens committed by each round, bonus included."""

    token_ids: list[int]
    rounds: list[int]


@dataclass(frozen=True)
class CategoryResult:
    """tau: sum of committed tokens over sum of rounds; mean_tau: mean of the prompts' own."""

    prompts: int
    tau: float
    mean_tau: float


class Drafter:
    """One sequence's drafter: the features seen so far, and guesses from them."""

    def __init__(self, network: DFlashNetwork, target: PreTrainedModel) -> None:
        self._network = network
        self._embedding = target.get_input_embeddings().weight
        self._head = target.get_output_embeddings().weight
        self._features: list[torch.Tensor] = []

    def append(self, hidden_states: tuple[torch.Tensor, ...], rows: int) -> None:
        """Takes the first ``rows`` positions' features of a target pass with one sequence."""
        taps = self._network.config.target_layer_ids
        self._features.append(torch.cat([hidden_states[i + 1][0, :rows] for i in taps], -1))

    def draft(self, anchor: int) -> list[int]:
        """The B - 1 tokens that should follow the anchor."""
        network, config = self._network, self._network.config
        features = torch.cat(self._features)[None]
        places = torch.arange(features.shape[1])[None]
        positions = features.shape[1] + torch.arange(config.block_length)[None]
        block = torch.full((1, config.block_length), config.mask_token_id)
        block[0, 0] = anchor
        hidden = network(
            network.embed(block, self._embedding),
            positions,
            network.context_kv(network.context_states(features), places),
            attention_masks(config.layer_masks, positions, places),
        )
        return network.logits(hidden[0, 1:], self._head).argmax(-1).tolist()


@torch.inference_mode()
def decode_speculatively(
    target: PreTrainedModel,
    network: DFlashNetwork,
    prompt: list[int],
    *,
    max_tokens: int,
    stop: set[int],
    verify_length: int,
) -> Decoded:
    """Greedy decoding in rounds; drafts at the trained block length, verifies a prefix."""
    cache = DynamicCache(config=target.config)
    drafter = Drafter(network, target)
    output = target(
        torch.tensor([prompt]), past_key_values=cache, output_hidden_states=True, logits_to_keep=1
    )
    drafter.append(output.hidden_states, len(prompt))
    tokens, rounds = [int(output.logits[0, -1].argmax())], []
    while len(tokens) < max_tokens and tokens[-1] not in stop:
        # propose
        size = min(verify_length, max_tokens - len(tokens))
        drafts = drafter.draft(tokens[-1])[: size - 1]
        # verify
        block = torch.tensor([[tokens[-1], *drafts]])
        output = target(block, past_key_values=cache, output_hidden_states=True)
        truth = output.logits[0].argmax(-1).tolist()
        # accept
        committed = accept(drafts, truth)
        ends = [i + 1 for i, token in enumerate(committed) if token in stop]
        committed = committed[: ends[0]] if ends else committed
        drafter.append(output.hidden_states, len(committed))
        tokens += committed
        rounds.append(len(committed))
        if rejected := block.shape[1] - len(committed):
            cache.crop(-rejected)
    return Decoded(tokens, rounds)


def accept(drafts: list[int], truth: list[int]) -> list[int]:
    """The agreed prefix of the drafts, then the target's own token after it."""
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == truth[agreed]:
        agreed += 1
    return truth[: agreed + 1]


@torch.inference_mode()
def walk(
    target: PreTrainedModel, network: DFlashNetwork, prompt: list[int], continuation: list[int]
) -> list[int]:
    """Tokens committed by each round if the target says exactly ``continuation``."""
    states = target(
        torch.tensor([prompt + continuation]), output_hidden_states=True, logits_to_keep=1
    ).hidden_states
    place, rounds = 0, []
    while place < len(continuation) - 1:
        drafter = Drafter(network, target)
        drafter.append(states, len(prompt) + place)
        truth = continuation[place + 1 :]
        drafts = drafter.draft(continuation[place])[: len(truth) - 1]
        rounds.append(len(accept(drafts, truth)))
        place += rounds[-1]
    return rounds


def read_prompts(path: Path, per_category: int) -> list[tuple[str, str]]:
    """(category, first user turn) of the first ``per_category`` prompts of each category."""
    taken: dict[str, list[str]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            prompt = json.loads(line)
            if len(taken[prompt["category"]]) < per_category:
                taken[prompt["category"]].append(prompt["turns"][0])
    return [(category, turn) for category, turns in taken.items() for turn in turns]


def chat_ids(tokenizer: PreTrainedTokenizerBase, turn: str) -> list[int]:
    """The user turn in the target's chat template, opened for the answer."""
    messages = [{"role": "user", "content": turn}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def summarize(decoded: Iterable[tuple[str, Decoded]]) -> dict[str, CategoryResult]:
    """Results by category, and last, under ``overall``, of all."""
    groups: dict[str, list[Decoded]] = defaultdict(list)
    everything = [(category, one) for category, one in decoded if one.rounds]
    for category, one in everything:
        groups[category].append(one)
    groups["overall"] = [one for _, one in everything]
    return {
        category: CategoryResult(
            prompts=len(group),
            tau=sum(sum(d.rounds) for d in group) / sum(len(d.rounds) for d in group),
            mean_tau=sum(sum(d.rounds) / len(d.rounds) for d in group) / len(group),
        )
        for category, group in groups.items()
    }
