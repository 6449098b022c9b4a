"""The engine computes what the stock model computes, whatever the chunks and rejections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashduet.kv.blocks import BlockTable
from flashduet.sampling.choose import choose_tokens
from flashduet.sampling.params import Sampling
from target_service.batching import Span
from target_service.session import PrefillChunk, StepFailure, StepResult, VerifyBlock
from tests.unit.target_support import (
    FAMILIES,
    TinyTarget,
    hidden_rows,
    load_tiny,
    prefill,
    prompt,
    run_one,
)

pytest_plugins = ["tests.support.threads"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return load_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return load_tiny(tmp_path_factory.mktemp("llama"), "llama")


def test_logits_equal_one_plain_pass_across_chunks_and_rollbacks(tiny: TinyTarget) -> None:
    # 300 tokens pass the windows of 24; scattered blocks are gathered, others read as a view.
    tokens = prompt(300)
    expected = tiny.reference(tokens).logits[0]
    for scattered in (False, True):
        session = tiny.session(tokens, room=310, scattered=scattered)
        base = 0
        for rows in (60, 1, 8, 1, 64, 5, 100, 1, 1, 16, 43):
            if 0 < base < 290:
                tiny.logits(session, base, prompt(4, seed=base))
                session.table.length = base
            logits = tiny.logits(session, base, tokens[base : base + rows])
            torch.testing.assert_close(logits, expected[base : base + rows], atol=1e-4, rtol=0)
            base += rows
        assert base == len(tokens)


def test_greedy_output_is_that_of_generate_whatever_is_drafted(tiny: TinyTarget) -> None:
    tokens = prompt(40, seed=1)
    expected = tiny.generate(tokens, 48)
    answer = tokens + expected
    session = tiny.session(tokens)
    prefill(tiny.engine, session, chunk=16)
    accepted = 0
    for round_number in range(100):
        anchor = session.anchor_position
        if session.committed_length >= len(answer):
            break
        right = answer[anchor + 1 : anchor + 1 + round_number % 7]
        wrong = [(right[-1] + 1) % 320] if right and round_number % 2 else []
        drafts = right[:-1] + wrong if wrong else right
        accepted += run_one(tiny.engine, VerifyBlock(session, anchor, drafts)).accepted
    assert session.token_ids[: len(answer)] == answer
    assert len(set(expected)) > 3, "an answer of one repeated token would hide mistakes"
    assert accepted > 10


def test_features_are_the_hidden_states_of_the_plain_pass(tiny: TinyTarget) -> None:
    """Layer L-1 among them: its state is the one after the final norm. Order is kept."""
    depth = tiny.target.config.num_hidden_layers
    layers = (depth - 1, 0, depth // 2)
    tokens = prompt(50, seed=2)
    session = tiny.session(tokens)
    results = prefill(tiny.engine, session, chunk=20, layers=layers)
    first = results[-1].committed[0]
    truth = tiny.generate(tokens, 6)
    assert first == truth[0]
    drafts = [truth[1], truth[2], (truth[3] + 1) % 320, truth[4]]
    results.append(run_one(tiny.engine, VerifyBlock(session, 50, drafts, layers)))
    assert results[-1].accepted == 2
    expected = tiny.reference(tokens + truth[:3])
    start = 0
    for result in results:
        assert result.context is not None
        assert result.context.base == start
        end = start + len(result.context.token_ids)
        assert list(result.context.token_ids) == (tokens + truth)[start:end]
        wanted = hidden_rows(expected, layers, start, end)
        torch.testing.assert_close(result.context.features, wanted, atol=1e-3, rtol=1e-4)
        start = end
    # Everything before the new anchor, and nothing else, has been given out.
    assert start == session.anchor_position == 53


def test_a_state_before_the_final_norm_would_be_noticed(tiny: TinyTarget) -> None:
    depth = tiny.target.config.num_hidden_layers
    tokens = prompt(8)
    caught = []
    layers = next(
        module
        for module in tiny.target.decoder.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth
    )
    handle = layers[-1].register_forward_hook(
        lambda _, __, out: caught.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    result = prefill(tiny.engine, tiny.session(tokens), layers=(depth - 1,))[-1]
    handle.remove()
    assert result.context is not None
    assert not torch.allclose(result.context.features, caught[0][0], atol=1e-2)


def test_hooks_exist_only_where_a_session_asked(tmp_path: Path) -> None:
    fresh = load_tiny(tmp_path)
    hooks = fresh.engine.features
    assert hooks.hooked_layer_ids == frozenset()
    prefill(fresh.engine, fresh.session(prompt(5)))
    assert hooks.hooked_layer_ids == frozenset()
    prefill(fresh.engine, fresh.session(prompt(5)), layers=(2, 0))
    assert hooks.hooked_layer_ids == {0, 2}
    plain = prefill(fresh.engine, fresh.session(prompt(5)))[-1]
    assert plain.context is None
    hooks.let_go()


def test_sampled_tokens_do_not_depend_on_blocks_or_chunks(llama: TinyTarget) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=7)
    tokens = prompt(30, seed=3)
    answers = []
    for chunk, block in ((100, 0), (7, 3), (30, 8)):
        session = llama.session(tokens, sampling=sampling, choice=2)
        prefill(llama.engine, session, chunk=chunk)
        while session.committed_length < 70:
            drafts = (answers[0] if answers else [])[session.committed_length :][:block]
            drafts = [*drafts[:-1], 5] if len(drafts) > 2 else drafts
            run_one(llama.engine, VerifyBlock(session, session.anchor_position, drafts))
        answers.append(session.token_ids[:70])
    assert answers[0] == answers[1] == answers[2]
    other = llama.session(tokens, sampling=sampling, choice=3)
    prefill(llama.engine, other)
    while other.committed_length < 70:
        run_one(llama.engine, VerifyBlock(other, other.anchor_position, []))
    assert other.token_ids[:70] != answers[0]


def test_noise_belongs_to_the_position_of_the_token_chosen(llama: TinyTarget) -> None:
    """First token for position P, row i of a block for base + i + 1: by the sampler itself."""
    sampling = Sampling(temperature=1.2, seed=5)
    tokens = prompt(20, seed=8)
    session = llama.session(tokens, sampling=sampling, choice=1)
    prefill(llama.engine, session, chunk=6)
    while session.committed_length < 40:
        run_one(llama.engine, VerifyBlock(session, session.anchor_position, [7, 8]))
    logits = llama.reference(session.token_ids).logits[0]
    for position in range(20, session.committed_length):
        row = logits[position - 1 : position]
        assert choose_tokens(row, position, sampling, 1).tokens == [session.token_ids[position]]


def test_sessions_in_one_step_do_not_touch_each_other(llama: TinyTarget) -> None:
    prompts = [prompt(20, seed=4), prompt(33, seed=5)]
    sessions = [llama.session(tokens) for tokens in prompts]
    chunks = [PrefillChunk(s, s.token_ids[:], 0, last=True) for s in sessions]
    assert all(isinstance(result, StepResult) for result in llama.engine.step(chunks))
    for _ in range(10):
        llama.engine.step([VerifyBlock(s, s.anchor_position, [9, 9]) for s in sessions])
    for tokens, session in zip(prompts, sessions, strict=True):
        got = session.token_ids[len(tokens) :]
        assert got == llama.generate(tokens, len(got))


def test_a_mix_of_sessions_computes_what_each_would_alone(tiny: TinyTarget) -> None:
    """Chunks and blocks of many lengths in one row, on contiguous and scattered blocks."""
    lengths = [(0, 40), (37, 1), (90, 1), (91, 1), (15, 3), (64, 4), (33, 8), (140, 5), (20, 33)]
    sessions, chunks = [], []
    for index, (base, rows) in enumerate(lengths):
        tokens = prompt(base + rows, seed=index)
        session = tiny.session(tokens, scattered=index % 2 == 1)
        if base:
            tiny.logits(session, 0, tokens[:base])
        sessions.append(session)
        chunks.append(Span(session.table.block_ids, base, tokens[base:]))
    with torch.inference_mode():
        every = torch.arange(sum(rows for _, rows in lengths))
        packed = tiny.engine.packed.forward(tiny.engine.kv, chunks, every)
    for session, got in zip(sessions, packed.split([r for _, r in lengths]), strict=True):
        expected = tiny.reference(session.token_ids).logits[0, -len(got) :]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_bad_numbers_fail_their_session_and_stay_in_no_block(llama: TinyTarget) -> None:
    """An embedding of NaN: the step goes on for the others, then its blocks go to another."""
    embedding = llama.target.model.get_input_embeddings().weight
    good = embedding[9].clone()
    first = [llama.session(prompt(8, seed=i)) for i in range(3)]
    for session in first:
        prefill(llama.engine, session)
    chunk, last = llama.session([9] * 20), llama.session([9] * 20)
    with torch.no_grad():
        embedding[9] = torch.nan
    results = llama.engine.step(
        [
            VerifyBlock(first[0], 8, [9]),
            VerifyBlock(first[1], 8, [5]),
            VerifyBlock(first[2], 8, [6]),
            PrefillChunk(chunk, [9] * 10, 0, last=False),
            PrefillChunk(last, [9] * 20, 0, last=True),
        ]
    )
    with torch.no_grad():
        embedding[9] = good
    failed = [isinstance(result, StepFailure) for result in results]
    assert failed == [True, False, False, True, True]
    assert (chunk.table.length, last.table.length, first[0].table.length) == (0, 0, 8)
    others = [llama.session(prompt(8, seed=20 + i)) for i in range(3)]
    others[0].table = BlockTable(last.table.block_ids)
    for session in others:
        prefill(llama.engine, session)
    every = [*others, first[0]]
    results = llama.engine.step([VerifyBlock(s, s.anchor_position, []) for s in every])
    assert [type(result) for result in results] == [StepResult] * 4
    for session in every:
        assert session.token_ids[8:] == llama.generate(session.token_ids[:8], 2)


def test_a_failing_item_leaves_its_session_and_the_others_alone(llama: TinyTarget) -> None:
    broken, sound = llama.session(prompt(12)), llama.session(prompt(12))
    prefill(llama.engine, broken)
    prefill(llama.engine, sound)
    before, length = list(broken.token_ids), broken.table.length
    outside = [10_000_000]
    results = llama.engine.step(
        [
            VerifyBlock(broken, broken.anchor_position, outside),
            VerifyBlock(sound, sound.anchor_position, []),
        ]
    )
    assert isinstance(results[0], StepFailure)
    assert isinstance(results[1], StepResult)
    assert (broken.token_ids, broken.table.length) == (before, length)
    again = run_one(llama.engine, VerifyBlock(broken, broken.anchor_position, []))
    assert again.committed == results[1].committed


def test_a_pass_that_breaks_off_midway_is_mended(llama: TinyTarget) -> None:
    """Some layers have taken the block's keys and values already when a later one fails."""
    session = llama.session(prompt(12))
    prefill(llama.engine, session)
    expected = llama.generate(session.token_ids[:12], 2)
    modules = list(llama.target.decoder.layers)  # type: ignore[arg-type]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = modules[2].register_forward_pre_hook(fail)
    (result,) = llama.engine.step([VerifyBlock(session, 12, [1, 2, 3])])
    handle.remove()
    assert isinstance(result, StepFailure)
    assert session.table.length == 12
    run_one(llama.engine, VerifyBlock(session, 12, [5, 6]))
    assert session.token_ids[12:14] == expected


def test_every_draft_right_gives_the_bonus_too(llama: TinyTarget) -> None:
    tokens = prompt(15, seed=6)
    truth = llama.generate(tokens, 9)
    session = llama.session(tokens)
    prefill(llama.engine, session)
    result = run_one(llama.engine, VerifyBlock(session, 15, truth[1:8]))
    assert (result.accepted, list(result.committed)) == (7, truth[1:9])
    assert session.table.length == session.committed_length - 1
