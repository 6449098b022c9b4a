"""Recorded passes give what others give, and leave what is not theirs alone.

On a machine without a GPU a tape stands for the CUDA graph and plain operations for flash-attn; the
last test runs both as they are where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from target_service.batching import Span
from target_service.compiled.checks import LARGEST_DIFFERENCE, relative_difference
from target_service.engine import Engine
from target_service.load import load_target
from target_service.session import VerifyBlock
from target_service.settings import TargetSettings
from tests.support.tape import unrecorded
from tests.support.tiny import tiny_target
from tests.unit.graph_support import LAYERS, Sequences, recorded, tape_of
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


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "mixtral"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    """Without and with windows, softcap and experts."""
    loaded = load_tiny(tmp_path_factory.mktemp(request.param), request.param)
    recorded(loaded)
    return loaded


@pytest.fixture
def sequences(tiny: TinyTarget) -> Iterator[Sequences]:
    made = Sequences(tiny, 17)
    yield made
    made.release()


# Steps at the borders of the shapes: single rows, blocks, both, and a rest of several sequences.
STEPS = [
    [1],
    [1, 1],
    [1, 1, 1],
    [2],
    [3],
    [1] * 5,
    [4, 1],
    [8],
    [1, 8],
    [1] * 17,
    [16, 16],
    [7, 1, 1, 16, 8],
    [64],
    [33, 32],
    [8] * 16,
    [17, 64, 1, 64, 64, 16, 13, 16],
]


def test_recorded_passes_compute_what_others_do(sequences: Sequences) -> None:
    engine, recorder = sequences.tiny.engine, tape_of(sequences.tiny)
    tables, owned = [*engine.kv.keys, *engine.kv.values], BLOCKS * BLOCK_TOKENS
    for rows in STEPS:
        # The same shapes, or nearly, with other numbers.
        steps = [sequences.spans(rows), sequences.spans(rows, first=5)]
        expected = []
        for spans in steps:
            with unrecorded(engine.packed):
                expected.append(sequences.forward(spans))
        written = [table.clone() for table in tables]
        for spans in steps:
            sequences.forget(spans)
        replayed = recorder.replayed
        for index in (0, 1, 0):
            logits, features = sequences.forward(steps[index])
            torch.testing.assert_close(logits, expected[index][0], atol=1e-4, rtol=0)
            torch.testing.assert_close(features, expected[index][1], atol=1e-3, rtol=0)
        assert recorder.replayed == replayed + 3
        for table, before in zip(tables, written, strict=True):
            torch.testing.assert_close(table[:, :owned], before[:, :owned], atol=1e-3, rtol=0)


def test_a_shape_is_recorded_once(sequences: Sequences) -> None:
    recorder = tape_of(sequences.tiny)
    sequences.forward(sequences.spans([5, 2]))
    made, replayed = recorder.made, recorder.replayed
    for rows in ([4, 4], [3, 5], [1, 6], [2, 5, 1]):
        sequences.forward(sequences.spans(rows))
    assert (recorder.made, recorder.replayed) == (made, replayed + 4)


def test_rows_of_nobody_change_no_slot_of_anybody(sequences: Sequences) -> None:
    engine = sequences.tiny.engine
    kv, recorder = engine.kv, tape_of(sequences.tiny)
    replayed = recorder.replayed
    for rows in ([1, 1, 1], [5], [33, 4], [64, 64, 5]):
        spans = sequences.spans(rows)
        before = [table.clone() for table in (*kv.keys, *kv.values)]
        sequences.forward(spans)
        mine = {
            slot
            for span in spans
            for position in range(span.base, span.end)
            for slot in [
                span.block_ids[position // kv.block_tokens] * kv.block_tokens
                + position % kv.block_tokens
            ]
        }
        others = [s for s in range(kv.num_blocks * kv.block_tokens) if s not in mine]
        for table, was in zip((*kv.keys, *kv.values), before, strict=True):
            assert torch.equal(table[:, others], was[:, others])
            assert torch.isfinite(table).all()
    assert recorder.replayed == replayed + 4


def test_a_step_does_not_overwrite_what_the_last_one_gave(sequences: Sequences) -> None:
    recorder = tape_of(sequences.tiny)
    replayed = recorder.replayed
    first = sequences.forward(sequences.spans([4, 4]))
    kept = [part.clone() for part in first]
    second = sequences.forward([Span(sequences.tables[3].block_ids, 0, prompt(8, seed=99))])
    assert recorder.replayed == replayed + 2
    for part, was, other in zip(first, kept, second, strict=True):
        assert torch.equal(part, was)
        assert not torch.equal(part[:2], other[:2])


def test_greedy_output_is_that_of_generate_with_drafts_and_rollbacks(tiny: TinyTarget) -> None:
    tokens = prompt(40, seed=1)
    answer = tokens + tiny.generate(tokens, 48)
    recorder = tape_of(tiny)
    session, replayed = tiny.session(tokens), recorder.replayed
    prefill(tiny.engine, session)
    rounds = accepted = 0
    while session.committed_length < len(answer):
        anchor = session.anchor_position
        drafts = answer[anchor + 1 : anchor + 1 + rounds % 7]
        if drafts and rounds % 2:
            drafts[-1] = (drafts[-1] + 1) % 320
        result = run_one(tiny.engine, VerifyBlock(session, anchor, drafts, LAYERS))
        assert result.context is not None
        assert result.context.features.shape == (result.accepted + 1, 64 * len(LAYERS))
        accepted += result.accepted
        rounds += 1
    assert session.token_ids[: len(answer)] == answer
    assert accepted > 10
    # The prompt is a single span of fewer rows than a chunk: it too.
    assert recorder.replayed - replayed >= rounds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "mixtral"])
def test_cuda_graphs_compute_what_passes_without_them_do(family: str, tmp_path: Path) -> None:
    pytest.importorskip("flash_attn")
    folder = tiny_target(tmp_path, family)
    target = load_target(TargetSettings(model=str(folder), device="cuda", dtype="bfloat16"))
    engine = Engine(target, 8, 256, graph_bytes=1 << 29)
    engine.warm_up()
    packed = engine.packed
    assert packed.graphs is not None
    # Experts may wait for the device; then it has said so, and the rest holds nevertheless.
    assert packed.graphs.recordings or family == "mixtral"
    bases, tokens = [300, 7, 40], [prompt(400, seed=seed) for seed in range(3)]
    tables = [[5, 1], [3], [6]]
    with torch.inference_mode():
        for table, base, ids in zip(tables, bases, tokens, strict=True):
            packed.forward(engine.kv, [Span(table, 0, ids[:base])], torch.zeros(1).long().cuda())
        for rows in ([1], [1, 1, 1], [8], [5, 1, 9], [64, 33, 1]):
            spans = [
                Span(table, base, ids[base : base + count])
                for table, base, ids, count in zip(tables, bases, tokens, rows, strict=False)
            ]
            keep = torch.arange(sum(rows), device="cuda")
            with engine.features.recording(LAYERS):
                with unrecorded(packed):
                    logits = packed.forward(engine.kv, spans, keep)
                    features = engine.features.rows(LAYERS, 0, sum(rows))
                for _ in range(2):
                    got = packed.forward(engine.kv, spans, keep)
                    states = engine.features.rows(LAYERS, 0, sum(rows))
                    most = LARGEST_DIFFERENCE[torch.bfloat16]
                    assert relative_difference(got, logits) < most
                    assert relative_difference(states, features) < most
