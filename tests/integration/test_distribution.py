"""Sampled answers of a real pair follow the target's joint law, whatever the drafter guesses.

The engines of both services, in process: several positions in a row, with blocks that are accepted
in part, for consecutive seeds and for consecutive choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashduet.sampling.params import Sampling
from target_service.session import PrefillChunk, Session, VerifyBlock
from tests.support.tiny import tiny_drafter
from tests.unit.drafting import DraftingEngine, engine_of
from tests.unit.target_support import TinyTarget, load_tiny, run_one

PROMPT = [7, 90, 41, 200]
POSITIONS = 3
# Strong noise and a wide filter, so that the random drafter often guesses right.
KEPT = 200
TEMPERATURE = 4.0
BLOCK = 4
SAMPLES = 800
# Tokens are counted by their id's remainder: few enough outcomes to have expectations.
CLASSES = 3
# A right sampler fails a test of this size once in a million runs; seeds are fixed besides.
Z_LIMIT = 5.0

Answer = tuple[int, ...]


@dataclass
class Pairing:
    target: TinyTarget
    draft: DraftingEngine
    accepted: int = 0
    rejected: int = 0

    def answer(self, sampling: Sampling, choice: int) -> Answer:
        """POSITIONS tokens by prefill and rounds, as the services drive the engines."""
        layers = self.draft.config.target_layer_ids
        session = self.target.session(PROMPT, sampling=sampling, choice=choice)
        first = run_one(
            self.target.engine, PrefillChunk(session, PROMPT, 0, last=True, layer_ids=layers)
        )
        context = self.draft.new_context()
        rows = first.context
        while session.committed_length < len(PROMPT) + POSITIONS:
            assert rows is not None
            ingest = self.draft.ingest_work(context, rows.base, rows.features)
            propose = self.draft.proposal(
                context,
                session.anchor_position,
                session.token_ids[-1],
                BLOCK,
                session.sampling,
                choice,
            )
            (drafts,) = self.draft.step([ingest], [propose]).drafts
            assert drafts is not None
            rows = self._verify(session, drafts.token_ids, layers)
        self.draft.pool.close(context)
        self.target.pool.release(session.table)
        return tuple(session.token_ids[len(PROMPT) : len(PROMPT) + POSITIONS])

    def _verify(self, session: Session, drafts: list[int], layers: tuple[int, ...]):
        block = VerifyBlock(session, session.anchor_position, drafts, layer_ids=layers)
        result = run_one(self.target.engine, block)
        self.accepted += result.accepted
        self.rejected += result.accepted < len(drafts)
        return result.context

    @torch.inference_mode()
    def law(self) -> Tensor:
        """Probability of every class of answer, [CLASSES] * POSITIONS, from plain passes of the
        stock model over every prefix that the filter allows."""
        prefixes = torch.tensor([PROMPT])
        chances = torch.ones(1, dtype=torch.float64)
        classes = torch.zeros(1, dtype=torch.int64)
        for _ in range(POSITIONS):
            stock = self.target.stock
            logits = torch.cat(
                [stock(part, use_cache=False).logits[:, -1] for part in prefixes.split(2048)]
            )
            kept = (logits.double() / TEMPERATURE).topk(KEPT, dim=-1)
            chances = (chances[:, None] * kept.values.softmax(-1)).flatten()
            classes = (classes[:, None] * CLASSES + kept.indices % CLASSES).flatten()
            before = prefixes.repeat_interleave(KEPT, dim=0)
            prefixes = torch.cat([before, kept.indices.flatten()[:, None]], dim=1)
        law = torch.zeros(CLASSES**POSITIONS, dtype=torch.float64)
        return law.index_add_(0, classes, chances).view([CLASSES] * POSITIONS)


@pytest.fixture(scope="module")
def pairing(tmp_path_factory: pytest.TempPathFactory) -> Pairing:
    root: Path = tmp_path_factory.mktemp("law")
    target = load_tiny(root / "target", "llama")
    drafter = tiny_drafter(root / "drafter", target.folder)
    return Pairing(target, engine_of(drafter, target.folder))


def keys(consecutive: str) -> list[tuple[Sampling, int]]:
    def sampling(seed: int) -> Sampling:
        return Sampling(temperature=TEMPERATURE, top_k=KEPT, seed=seed)

    if consecutive == "seeds":
        return [(sampling(1_000 + index), 0) for index in range(SAMPLES)]
    return [(sampling(5), index) for index in range(SAMPLES)]


@pytest.mark.parametrize("consecutive", ["seeds", "choices"])
def test_drafted_answers_have_the_targets_joint_law(pairing: Pairing, consecutive: str):
    law = pairing.law()
    assert law.sum().item() == pytest.approx(1.0)
    pairing.accepted = pairing.rejected = 0
    answers = [pairing.answer(sampling, choice) for sampling, choice in keys(consecutive)]
    seen = torch.zeros_like(law)
    for answer in answers:
        seen[tuple(token % CLASSES for token in answer)] += 1
    assert pairing.accepted > SAMPLES / 4, "the accept path must be walked"
    assert pairing.rejected > SAMPLES / 4, "the reject path must be walked"

    expected = SAMPLES * law
    assert expected.min() >= 5
    freedom = law.numel() - 1
    chi_square = ((seen - expected) ** 2 / expected).sum().item()
    assert (chi_square - freedom) / math.sqrt(2 * freedom) < Z_LIMIT
    assert all(abs(score) < Z_LIMIT for score in surprise(pairing, answers))


@torch.inference_mode()
def surprise(pairing: Pairing, answers: list[Answer]) -> list[float]:
    """Standard scores, one a position, of the answers' log-probabilities under the target.

    Given what came before, log p of a sampled token has mean -H and a variance that the filtered
    law tells; tokens that are the drafter's rather than the target's are far less likely.
    """
    ids = torch.tensor([[*PROMPT, *answer] for answer in answers])
    logits = pairing.target.stock(ids, use_cache=False).logits.double()
    scores = []
    for position in range(len(PROMPT), ids.shape[1]):
        kept = (logits[:, position - 1] / TEMPERATURE).topk(KEPT, dim=-1)
        log_chances = kept.values.log_softmax(-1)
        chosen = (kept.indices == ids[:, position, None]).double()
        assert bool(chosen.any(-1).all()), "a token that the filter drops was chosen"
        mean = (log_chances.exp() * log_chances).sum(-1)
        variance = (log_chances.exp() * log_chances.square()).sum(-1) - mean.square()
        excess = (chosen * log_chances).sum(-1) - mean
        scores.append((excess.sum() / variance.sum().sqrt()).item())
    return scores
