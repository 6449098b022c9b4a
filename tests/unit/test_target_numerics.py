"""With batch_invariant numerics a session's tokens are the same bits in bfloat16 in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashduet.errors import ConfigurationError
from flashduet.kv.blocks import BlockPool
from flashduet.packed_linear import can_pack
from target_service.engine import Engine
from target_service.invariance_trial import make_invariant
from target_service.load import load_target
from target_service.session import PrefillChunk, Session, VerifyBlock
from target_service.settings import TargetSettings
from tests.support.tiny import tiny_target
from tests.unit.target_support import TinyTarget, prefill, prompt

FAMILIES = {"llama": {}, "gemma3": {"max_position_embeddings": 256}}
LENGTH = 40


@pytest.fixture(scope="module", params=[*FAMILIES])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this processor has no bfloat16 products")
    folder = tmp_path_factory.mktemp(request.param)
    tiny_target(folder, request.param, **FAMILIES[request.param])
    target = load_target(TargetSettings(model=str(folder), device="cpu", dtype="bfloat16"))
    engine = Engine(target, 1024, 16, "batch_invariant")
    engine.warm_up()
    return TinyTarget(folder, target, engine, target.model, BlockPool(1024, 16))


def plain_answer(tiny: TinyTarget, tokens: list[int], chunk: int) -> list[int]:
    session = tiny.session(tokens)
    prefill(tiny.engine, session, chunk=chunk)
    while session.committed_length < len(tokens) + LENGTH:
        tiny.engine.step([VerifyBlock(session, session.anchor_position, [])])
    answer = session.token_ids[len(tokens) :]
    tiny.pool.release(session.table)
    return answer


# Across the border of the first stretch of keys while the answer grows.
PROMPT = prompt(110, seed=3)


@pytest.mark.parametrize("block", [4, 8, 16])
def test_tokens_do_not_depend_on_the_block_length(tiny: TinyTarget, block: int) -> None:
    expected = plain_answer(tiny, PROMPT, chunk=1000)
    assert len(set(expected)) > 3
    session = tiny.session(PROMPT)
    prefill(tiny.engine, session, chunk=23)
    rounds = 0
    while session.committed_length < len(PROMPT) + LENGTH:
        anchor = session.anchor_position
        done = anchor - len(PROMPT) + 1
        drafts = expected[done : done + block - 1]
        if drafts and rounds % 2:
            drafts[len(drafts) // 2] = (drafts[len(drafts) // 2] + 1) % 320
        tiny.engine.step([VerifyBlock(session, anchor, drafts)])
        rounds += 1
    assert session.token_ids[len(PROMPT) :][:LENGTH] == expected[:LENGTH]
    tiny.pool.release(session.table)


def test_tokens_do_not_depend_on_the_batch(tiny: TinyTarget) -> None:
    prompts = [prompt(5 + 7 * i, seed=i) for i in range(32)]
    sessions = [tiny.session(tokens, room=272) for tokens in prompts]
    tiny.engine.step([PrefillChunk(s, s.token_ids[:], 0, last=True) for s in sessions[:20]])
    late: list[Session] = sessions[20:]
    running = sessions[:20]
    while running[0].committed_length < 5 + LENGTH:
        items: list = [VerifyBlock(s, s.anchor_position, []) for s in running]
        if late:
            joining = late.pop()
            items.append(PrefillChunk(joining, joining.token_ids[:], 0, last=True))
            running.append(joining)
        tiny.engine.step(items)
    for tokens, session in list(zip(prompts, sessions, strict=True))[::5]:
        count = session.committed_length - len(tokens)
        assert session.token_ids[len(tokens) :] == plain_answer(tiny, tokens, 64)[:count]
    for session in sessions:
        tiny.pool.release(session.table)


def test_logits_have_the_same_bits(tiny: TinyTarget) -> None:
    whole = tiny.session(PROMPT)
    together = tiny.logits(whole, 0, PROMPT)
    alone = tiny.session(PROMPT)
    rows = [tiny.logits(alone, i, PROMPT[i : i + 1]) for i in range(len(PROMPT))]
    assert torch.equal(torch.cat(rows), together)


def test_what_cannot_be_had_is_refused(tiny: TinyTarget) -> None:
    """A layer whose result depends on its company: the trial at start notices."""
    folder: Path = tiny.folder
    target = load_target(TargetSettings(model=str(folder), device="cpu", dtype="bfloat16"))
    engine = Engine(target, 128, 16)
    layers = next(m for m in target.model.modules() if isinstance(m, torch.nn.ModuleList))
    layers[1].register_forward_hook(
        lambda _, __, out: out * (1 + out.shape[1] / 64) if torch.is_tensor(out) else out
    )
    with torch.inference_mode(), pytest.raises(ConfigurationError, match="batch_invariant"):
        make_invariant(engine.packed, engine.kv, 320)
