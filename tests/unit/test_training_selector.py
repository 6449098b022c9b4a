"""Training a drafter with a candidate selector (DFlash 2)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dflash.model import DFlash2DraftModel
from safetensors.torch import load_file

from draft_service.checkpoint import load_drafter
from drafter_training.acceptance import every_draft
from drafter_training.blocks import UNKNOWN, BlockRule
from drafter_training.drafter import DrafterShape, new_drafter, target_head
from drafter_training.drafting import draft_logits, greedy_drafts
from drafter_training.scoring import batch_of, score_answers, with_copies
from drafter_training.shards import Sequence
from drafter_training.target import load_target
from tests.support.tiny import tiny_drafter, tiny_target
from tests.unit.drafter_formats import make_dflash2
from tests.unit.drafting import engine_of, features_for
from tests.unit.test_training_commands import common, invoke
from tests.unit.training_support import MASK, TAPS, tiny_llama


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("selector")
    tiny_target(root / "target")
    invoke("data", *common(root), "--answer-tokens", 400, "--slots", 8)
    return root


@pytest.fixture(scope="module")
def plain(root: Path) -> Path:
    """A drafter without a selector."""
    return trained(root, "plain")


@pytest.fixture(scope="module")
def drafter(root: Path, plain: Path) -> Path:
    """One with a selector, begun from it."""
    return trained(root, "second", "--selector-rank", 6, "--init-from", plain)


def trained(root: Path, name: str, *options: object) -> Path:
    run = ("run", *common(root), "--data", root / "data", "--name", name, "--epochs", 0.5)
    return Path(invoke(*run, *options).stdout.strip())


def test_its_selector_is_trained_and_its_convolutions_stay_as_they_are(drafter: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["dflash_config"]["selector_rank"] == 6
    weights = load_file(drafter / "model.safetensors")
    assert weights["candidate_selector.successor_codebook"].any()
    for layer in range(2):
        for name in ("attention_conv", "mlp_conv"):
            assert (weights[f"layers.{layer}.{name}.base_kernel"] == 1).all()
            assert not weights[f"layers.{layer}.{name}.kernel_projection.weight"].any()


def test_the_draft_service_leaves_those_convolutions_out(drafter: Path, root: Path) -> None:
    engine = engine_of(drafter, root / "target")
    convolutions = [
        conv for layer in engine.network._decoder_layers() for conv in layer.convolutions
    ]
    assert len(convolutions) == 4
    assert all(conv.skipped for conv in convolutions)


@pytest.mark.filterwarnings("ignore")
def test_the_official_code_gives_the_same_states(drafter: Path, root: Path) -> None:
    official = DFlash2DraftModel.from_pretrained(drafter, dtype=torch.float32).eval()
    state = official.state_dict()
    for name, ours in load_drafter(drafter, dtype=torch.float32).state_dict().items():
        theirs = state.get(name, state.get(f"{name}.weight"))
        assert theirs is not None, name
        assert torch.equal(ours, theirs), name


def test_a_drafter_is_continued_with_the_selector_it_has(
    root: Path, plain: Path, drafter: Path
) -> None:
    run = ("run", *common(root), "--data", root / "data", "--epochs", 0.5, "--init-from", drafter)
    for name, rank in (("other", 5), ("none", 0)):
        refused = invoke(*run, "--name", name, "--selector-rank", rank, expect=1)
        assert f"selector_rank = 6, this run {rank}" in refused.output.replace("\n", " ")
    again = trained(root, "again", "--selector-rank", 6, "--init-from", drafter)
    begun = json.loads((root / "again/run.json").read_text())
    assert begun["tau_before"] == pytest.approx(
        json.loads((root / "second/run.json").read_text())["result"]["tau"]
    )
    assert (again / "model.safetensors").is_file()


def test_a_fresh_selector_changes_no_draft(root: Path, plain: Path) -> None:
    fresh = trained(root, "fresh", "--selector-rank", 6, "--init-from", plain, "--minutes", 0.1)
    run = json.loads((root / "fresh/run.json").read_text())
    before = json.loads((root / "plain/run.json").read_text())["result"]["tau"]
    assert run["tau_before"] == pytest.approx(before)
    assert fresh.is_dir()


def test_a_drafter_with_a_selector_starts_from_the_targets_layers_too() -> None:
    networks = []
    for rank in (0, 6):
        shape = DrafterShape(layers=2, selector_rank=rank)
        network, _, start = new_drafter(tiny_llama(), shape, TAPS, MASK, seed=0)
        assert start == "the target's layers 1, 2"
        networks.append(network.state_dict())
    plain, with_selector = networks
    for name in ("layers.0.mlp.up_proj.weight", "layers.1.self_attn.q_proj.weight"):
        assert torch.equal(plain[name], with_selector[name])


@pytest.fixture
def walked(tmp_path: Path) -> tuple[Path, Path]:
    """A target, and a drafter whose selector matters."""
    target = tiny_target(tmp_path / "target", "llama")
    return target, make_dflash2(tiny_drafter(tmp_path / "drafter", target), kernel=1)


def test_training_drafts_what_the_service_drafts(walked: tuple[Path, Path]) -> None:
    target, drafter = walked
    network = load_drafter(drafter, dtype=torch.float32)
    head = target_head(load_target(target, torch.float32), torch.float32)
    config = network.config
    engine = engine_of(drafter, target)
    features = features_for(engine, 30)
    tokens = torch.randint(300, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    rows = torch.cat([features, torch.zeros(30, config.hidden_size)], -1)
    batch = batch_of([Sequence(tokens, 10, True)], [rows], config.hidden_size)
    rule = BlockRule(config.block_length, config.mask_token_id, anchors=0)
    blocks, drafts = every_draft(network, batch, head, rule)
    for index, anchor in enumerate(blocks.anchors[0].tolist()):
        context = engine.new_context()
        engine.ingest(context, 0, features[:anchor])
        work = engine.proposal(context, anchor, tokens[anchor], config.block_length)
        served = engine.step([], [work]).drafts[0]
        assert served is not None
        known = int((blocks.labels[0, index] != UNKNOWN).sum())
        assert drafts[0, index, :known].tolist() == served.token_ids[:known]


def test_logits_with_the_true_tokens_before_are_those_of_a_walk_that_took_them(
    walked: tuple[Path, Path],
) -> None:
    target, drafter = walked
    network = load_drafter(drafter, dtype=torch.float32)
    selector = network.candidate_selector
    assert selector is not None
    head = target_head(load_target(target, torch.float32), torch.float32).head
    selector.top_k = len(head)
    hidden = torch.randn(5, network.config.hidden_size, generator=torch.Generator().manual_seed(4))
    for ids in (None, torch.arange(0, 320, 3)):
        drafts = greedy_drafts(network, hidden, [9], [5], head, ids)
        previous = torch.tensor([9, *drafts[:-1].tolist()])
        part = head if ids is None else head[ids]
        best = draft_logits(network, hidden, previous, part, ids).argmax(-1)
        assert drafts.tolist() == (best if ids is None else ids[best]).tolist()


def test_rounds_with_copies_are_told_beside_the_drafters_own(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    drafter = tiny_drafter(tmp_path / "drafter", target)
    loop = [40, 41, 42, 43] * 7
    answer = [Sequence([5, 6, *loop], 2, greedy=True)]
    found = score_answers(target, drafter, answer, lookup=3)[0]
    assert found.alone == score_answers(target, drafter, answer)[0].rounds
    # The first period has nothing before it; from the third repeated token on all is copied.
    assert found.rounds[-1] + found.rounds[-2] > 8
    assert len(found.rounds) < len(found.alone)
    assert sum(found.rounds) == sum(found.alone) == len(loop) - 1


def test_copies_are_looked_for_up_to_the_end_of_an_answer() -> None:
    """Counts of a batch go on to the end of its longest."""
    answer = Sequence([5, 6, *[40, 41] * 4], 2, greedy=True)
    assert with_copies([0] * 20, [[300] * 3] * 20, answer, 2) == [0, 0, 0, 3, 3, 2, 1, 0]
