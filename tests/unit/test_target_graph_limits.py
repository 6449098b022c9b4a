"""What is recorded and when, what it may take, and what happens where it cannot be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from target_service import graphs as graphs_module
from target_service.batching import Span
from target_service.graph_inputs import PassShape, ShapeRule, StaticInputs
from target_service.graphs import obstacle
from target_service.memory import plan_memory
from target_service.session import StepResult, VerifyBlock
from target_service.settings import TargetSettings
from tests.support.tape import TapeRecorder
from tests.unit.graph_support import BUDGET, LAYERS, Sequences, own_graphs, recorded
from tests.unit.target_support import (
    BLOCK_TOKENS,
    BLOCKS,
    TinyTarget,
    load_tiny,
    prefill,
    prompt,
    run_one,
)

pytest_plugins = ["tests.support.threads"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llama(tmp_path: Path) -> TinyTarget:
    return load_tiny(tmp_path, "llama")


def test_long_stretches_and_large_steps_run_without() -> None:
    rule = ShapeRule(256, 512, 256)
    blocks = range(99)
    assert rule.find([Span(blocks, 0, [0] * 65)]) is None
    assert rule.find([Span(blocks, 0, [0] * 64)] * 5) is None
    assert rule.find([Span(blocks, 0, [0] * 64)] * 4) == PassShape(256, 8, 64, 4)
    assert rule.find([Span(blocks, 0, [0] * 64), Span(blocks, 64, [0])]) == PassShape(128, 4, 64, 4)
    assert rule.find([Span(blocks, 0, [0] * 2)]) == PassShape(2, 2, 2, 4)
    assert rule.find([Span(blocks, 8000, [0])]) == PassShape(1, 1, 1, 32)
    # No table is wider than there are blocks.
    assert ShapeRule(256, 30, 256).find([Span(blocks, 7000, [0])]) == PassShape(1, 1, 1, 30)


def test_every_shape_has_room_for_the_rows_of_nobody(llama: TinyTarget) -> None:
    for block_tokens in (1, 16, 256):
        rule = ShapeRule(128, llama.engine.kv.num_blocks, block_tokens)
        inputs = StaticInputs(rule, llama.engine.kv)
        for rows in range(1, 129):
            lengths = [min(64, rows - start) for start in range(0, rows, 64)]
            for counts in (lengths, [1] * rows):
                spans = [Span(range(500), 0, [7] * count) for count in counts]
                shape = rule.find(spans)
                assert shape is not None
                inputs.fill(shape, spans, torch.arange(rows))
                views = inputs.views(shape)
                starts = views.row_starts.tolist()
                assert starts[0] == 0
                assert starts[-1] == shape.rows == len(views.ids)
                lengths = views.row_starts.diff().tolist()
                assert max(lengths) <= shape.longest_rows
                assert views.key_starts.diff().tolist() == lengths
                assert max(lengths) <= shape.blocks * block_tokens
        for shape in rule.first():
            inputs.fill(shape, [], torch.arange(0))
            assert inputs.views(shape).row_starts[-1] == shape.rows


def test_blocks_that_do_not_hold_the_positions_are_an_error(llama: TinyTarget) -> None:
    rule = ShapeRule(8, 512, 16)
    span = Span([3], 14, [1, 2, 3])
    shape = rule.find([span])
    assert shape is not None
    with pytest.raises(ValueError, match="positions up to 17 wanted, 1 blocks of 16"):
        StaticInputs(rule, llama.engine.kv).fill(shape, [span], torch.arange(3))


def test_what_is_likely_is_recorded_at_the_start(
    llama: TinyTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs_module, "MOST_ROWS", 8)
    before = [table.clone() for table in (*llama.engine.kv.keys, *llama.engine.kv.values)]
    with caplog.at_level(logging.INFO):
        recorder = recorded(llama, start_s=600.0)
    assert "CUDA graphs: passes of up to 8 rows, 7 shapes recorded" in caplog.text
    # The probe's 25 tokens are in the first blocks, and nothing else is written.
    for table, was in zip((*llama.engine.kv.keys, *llama.engine.kv.values), before, strict=True):
        assert torch.equal(table[:, 32 : BLOCKS * BLOCK_TOKENS], was[:, 32 : BLOCKS * BLOCK_TOKENS])
    sequences = Sequences(llama, 4)
    made = recorder.made
    for rows in ([1], [1, 1, 1], [3], [8]):
        with torch.inference_mode():
            logits = llama.engine.packed.forward(
                llama.engine.kv, sequences.spans(rows), torch.arange(sum(rows))
            )
        assert torch.isfinite(logits).all()
    assert recorder.made == made


def test_the_least_recently_used_recording_goes(
    llama: TinyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "MOST_RECORDINGS", 3)
    recorder = recorded(llama)
    sequences, graphs = Sequences(llama, 8), own_graphs(llama)
    for rows in ([1], [2], [4]):
        sequences.forward(sequences.spans(rows))
    assert graphs.recordings == 3
    made = recorder.made
    sequences.forward(sequences.spans([1]))
    sequences.forward(sequences.spans([8]))  # in place of [2]
    sequences.forward(sequences.spans([1]))
    sequences.forward(sequences.spans([4]))
    assert recorder.made == made + 1
    sequences.forward(sequences.spans([2]))
    assert recorder.made == made + 2
    assert graphs.recordings == 3


def test_a_budget_that_is_used_up_ends_recording_but_not_what_is_recorded(
    llama: TinyTarget, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorded(llama)
    sequences = Sequences(llama, 8)
    recorder.nbytes = BUDGET
    with caplog.at_level(logging.WARNING):
        expected = sequences.forward(sequences.spans([4]))
        for rows in ([8], [2]):
            sequences.forward(sequences.spans(rows))
    made, replayed = recorder.made, recorder.replayed
    got = sequences.forward(sequences.spans([4]))
    assert torch.equal(got[0], expected[0])
    assert (recorder.made, recorder.replayed) == (made, replayed + 1)
    assert caplog.text.count("no more shapes are recorded") == 1


def test_a_small_budget_has_smaller_passes(llama: TinyTarget) -> None:
    # Logits of 32 rows are a quarter of it.
    recorded(llama, 32 * 320 * 4 * 4)
    graphs = own_graphs(llama)
    assert graphs.rule.most_rows == 32
    assert graphs.rule.find([Span(range(4), 0, [0] * 33)]) is None
    sequences = Sequences(llama, 2)
    logits, _ = sequences.forward(sequences.spans([33]))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("family", "reason", "start_s"),
    [
        ("gpt_oss", "attends with sinks", 60.0),
        ("llama4", "attends with chunks", 60.0),
        ("mixtral", "not permitted when stream is capturing", 60.0),
        ("mixtral", "not permitted when stream is capturing", 0.0),
    ],
)
def test_a_model_that_cannot_be_recorded_runs_without_and_says_why(
    family: str,
    reason: str,
    start_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(graphs_module, "MOST_ROWS", 8)
    tiny = load_tiny(tmp_path, family)
    if family == "mixtral":
        # In the loop over experts that have tokens.
        tiny.engine.packed.model.set_experts_implementation("eager")
    with caplog.at_level(logging.WARNING):
        recorder = recorded(tiny, start_s=start_s)
        tokens = prompt(40, seed=1)
        session = tiny.session(tokens)
        prefill(tiny.engine, session, layers=LAYERS)
        for _ in range(5):
            run_one(tiny.engine, VerifyBlock(session, session.anchor_position, [4, 5], LAYERS))
    assert session.token_ids[:45] == tokens + tiny.generate(tokens, 5)
    assert recorder.replayed == 0
    assert caplog.text.count("passes run without CUDA graphs") == 1
    assert reason in caplog.text


def test_a_failure_while_it_serves_costs_no_answer(
    llama: TinyTarget, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorded(llama)
    recorder.fail_from = recorder.made + 2
    tokens = prompt(40, seed=1)
    answer = tokens + llama.generate(tokens, 30)
    session = llama.session(tokens)
    prefill(llama.engine, session, layers=LAYERS)
    rounds = 0
    with caplog.at_level(logging.WARNING):
        while session.committed_length < len(answer):
            anchor = session.anchor_position
            drafts = answer[anchor + 1 : anchor + 1 + rounds % 4]
            [result] = llama.engine.step([VerifyBlock(session, anchor, drafts, LAYERS)])
            assert isinstance(result, StepResult), result
            rounds += 1
    assert session.token_ids[: len(answer)] == answer
    assert caplog.text.count("without CUDA graphs: out of memory, says the test\n") == 1
    assert own_graphs(llama).recordings == 0


def test_recordings_that_compute_something_else_are_not_used(
    llama: TinyTarget, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(TapeRecorder):
        """Repeats nothing."""

        def record(self, function):  # type: ignore[no-untyped-def]
            super().record(function)
            return lambda: None

    recorded(llama, recorder=Forgetful())
    assert "without CUDA graphs: logits of recorded passes differ" in caplog.text
    tokens = prompt(40, seed=1)
    session = llama.session(tokens)
    prefill(llama.engine, session)
    assert session.token_ids[40:] == llama.generate(tokens, 1)


def test_layers_that_a_drafter_asks_for_later_are_recorded_anew(llama: TinyTarget) -> None:
    recorder = recorded(llama)
    tokens = prompt(40, seed=1)
    plain, drafted = llama.session(tokens), llama.session(tokens)
    prefill(llama.engine, plain)
    made = recorder.made
    run_one(llama.engine, VerifyBlock(plain, 40, []))
    assert recorder.made == made
    prefill(llama.engine, drafted)
    result = run_one(llama.engine, VerifyBlock(drafted, 40, [], LAYERS))
    assert recorder.made == made + 1
    assert result.context is not None
    hidden = llama.reference(drafted.token_ids[:41]).hidden_states
    expected = torch.cat([hidden[layer_id + 1][0, 40:41] for layer_id in LAYERS], dim=-1)
    torch.testing.assert_close(result.context.features, expected, atol=1e-3, rtol=0)


def test_what_stands_in_the_way_is_named() -> None:
    cuda = torch.device("cuda")
    for settings, device, reason in [
        ({}, torch.device("cpu"), "no GPU"),
        ({"cuda_graphs": False}, cuda, "FLASHDUET_TARGET_CUDA_GRAPHS"),
        ({"numerics": "batch_invariant"}, cuda, "batch_invariant"),
        ({"block_tokens": 16}, cuda, "FLASHDUET_TARGET_BLOCK_TOKENS at 0 or set a multiple of 256"),
    ]:
        assert reason in (obstacle(TargetSettings(**settings), device, torch.bfloat16) or "")


def test_the_memory_plan_tells_what_recordings_may_take(
    llama: TinyTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TargetSettings(max_kv_tokens=64)
    assert plan_memory(settings, llama.target).graph_bytes == 0
    monkeypatch.setattr("target_service.memory.obstacle", lambda *_: None)
    monkeypatch.setattr("target_service.memory.available_memory", lambda: 8 << 30)
    plan = plan_memory(settings, llama.target)
    assert plan.graph_bytes == 512 << 20
    with caplog.at_level(logging.INFO):
        plan.print()
    assert "CUDA graphs up to 512 MiB" in caplog.text
