"""Compiled passes compute what Transformers does, come into use while sessions run, and are made
again where a file does not do."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flashduet.errors import ConfigurationError
from target_service.batching import Span
from target_service.compiled import build, runners
from target_service.compiled.adoption import Adoption, adopt_or_plan
from target_service.compiled.model import CompiledModel
from target_service.compiled.package import compiler, failure_path, package_path
from target_service.compiled.runners import NativeRunner, PythonRunner, Runner
from target_service.engine import Engine
from target_service.load import LoadedTarget, load_target
from target_service.session import VerifyBlock
from target_service.settings import TargetSettings
from tests.support.families import CASES, Case, measure
from tests.support.tiny import tiny_target
from tests.unit.target_support import TinyTarget, load_tiny, prefill, prompt, run_one
from tests.unit.test_target_process import start

pytest_plugins = ["tests.support.threads"]
pytestmark = pytest.mark.usefixtures("one_thread")

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
# Softcap and windows; sinks and experts.
FAMILIES = [case for case in CASES if case.family in ("gemma2", "gpt_oss")]
START_S = 600.0
END_S = 120.0


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny Llama with seed 0, in float32."""
    folder = tiny_target(tmp_path_factory.mktemp("compiled") / "target")
    settings = TargetSettings(model=str(folder), device="cpu", dtype="float32")
    path = folder.parent / "tiny"
    build.compile_pass(load_target(settings), path)
    return path


@needs_compiler
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_a_compiled_family_computes_what_transformers_computes(case: Case, tmp_path: Path) -> None:
    found = measure(case, tmp_path, compiled=True)
    assert found.logits < 1e-4
    assert found.features < 1e-3
    assert found.lossless


@needs_compiler
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("runner", [NativeRunner, PythonRunner])
def test_passes_go_over_in_the_middle_of_a_session(
    runner: type[Runner], package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "load_library", lambda: runner is NativeRunner)
    tiny = load_tiny(tmp_path)
    layers = (0, tiny.target.config.num_hidden_layers - 1)
    session = tiny.session(prompt(20))
    expected = prompt(20) + tiny.generate(prompt(20), 16)
    prefill(tiny.engine, session, 8, layers)
    before = _features(tiny, session.token_ids[:1], layers)
    for count in range(4):
        _step(tiny, session, expected, count)
    assert not tiny.engine.compiled
    compiled = CompiledModel(package, tiny.engine.packed.layers)
    assert type(compiled.runner) is runner
    tiny.engine.offer(compiled)
    assert tiny.engine.compiled
    assert tiny.engine.packed.model is not None  # until the next step
    while session.committed_length < 36:
        _step(tiny, session, expected, 3)
    assert tiny.engine.packed.model is None
    assert session.token_ids[:36] == expected
    assert torch.allclose(_features(tiny, expected[:1], layers), before, atol=1e-3)


@needs_compiler
@pytest.mark.usefixtures("native")
def test_a_native_pass_that_fails_leaves_the_next_one_alone(package: Path, tmp_path: Path) -> None:
    tiny = load_tiny(tmp_path)
    runner = NativeRunner(package, tiny.engine.packed.layers)
    kv = tiny.engine.kv
    inputs = [torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]), torch.arange(3)]
    right = Span([1], 0, [5, 6, 7])
    for wrong, told in (
        (Span([1], 0, [5, 6, 7, 8]), "4 rows planned, 3 given"),
        (Span([kv.num_blocks + 1], 0, [5, 6, 7]), "there is no block"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=told):
            runner.run(kv, [wrong], inputs)
        logits = runner.run(kv, [right], inputs)[0]
        expected = tiny.reference([5, 6, 7]).logits[0]
        assert torch.allclose(logits, expected, atol=1e-4)


@needs_compiler
def test_a_package_of_other_weights_is_not_taken(package: Path, tmp_path: Path) -> None:
    other = load_tiny(tmp_path, seed=1)
    with pytest.raises(ConfigurationError, match=r"differ by \d+%"):
        other.engine.offer(CompiledModel(package, other.engine.packed.layers))
    assert not other.engine.compiled
    session = other.session(prompt(20))
    prefill(other.engine, session)
    assert session.token_ids[20:] == other.generate(prompt(20), 1)


@dataclass(frozen=True)
class Planning:
    """A tiny target in 16 bits that is to be compiled, over an empty cache."""

    settings: TargetSettings
    target: LoadedTarget
    engine: Engine
    path: Path

    def plan(self) -> Adoption | None:
        return adopt_or_plan(self.settings, self.target, self.engine)


@pytest.fixture
def planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planning:
    monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path / "cache"))
    tiny = load_tiny(tmp_path / "target")
    settings = TargetSettings(
        model=str(tiny.folder), device="cpu", dtype="bfloat16", compile="auto"
    )
    target = load_target(settings)
    return Planning(settings, target, tiny.engine, package_path(target, 1))


@needs_compiler
def test_a_package_that_cannot_be_loaded_is_told_and_kept(
    planning: Planning, caplog: pytest.LogCaptureFixture
) -> None:
    planning.path.mkdir(parents=True)
    assert planning.plan() is None
    assert f"{planning.path} cannot be loaded" in caplog.text
    assert planning.path.exists()
    assert not planning.engine.compiled


@needs_compiler
def test_a_package_that_computes_something_else_is_removed_and_made_again(
    planning: Planning, package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = load_tiny(planning.path.parent / "other", seed=1)
    shutil.copytree(package, planning.path)
    adoption = replace(planning, engine=other.engine).plan()
    assert adoption is None or adoption.package == planning.path
    assert "is removed" in caplog.text
    assert not planning.path.exists()


@needs_compiler
def test_what_failed_once_is_not_tried_at_every_start(
    planning: Planning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert planning.plan() is not None
    failure = failure_path(planning.path)
    failure.write_text("tiny cannot be compiled: for a reason\n")
    assert planning.plan() is None
    assert "for a reason" in caplog.text
    assert str(failure) in caplog.text


@needs_compiler
def test_no_compiler_is_started_where_it_would_take_more_than_there_is(
    planning: Planning, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("target_service.compiled.adoption.available_memory", lambda: 1000)
    assert planning.plan() is None
    assert "MiB of memory, more than is free" in caplog.text


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(
    planning: Planning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    planning.path.parent.parent.mkdir(parents=True, exist_ok=True)
    planning.path.parent.write_text("a file where a folder should be")
    assert planning.plan() is None
    assert "the cache cannot be written" in caplog.text


def test_a_file_belongs_to_its_weights_and_threads(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target")
    target = load_target(TargetSettings(model=str(folder), device="cpu", dtype="bfloat16"))
    path = package_path(target, 1)
    assert package_path(target, 1) == path
    assert package_path(target, 2) != path
    os.utime(next(folder.glob("*.safetensors")), (1, 1))
    assert package_path(target, 1) != path


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float32"}, "in float32 passes stay as they are"),
        ({"dtype": "bfloat16", "numerics": "batch_invariant"}, "passes of one make"),
    ],
)
def test_what_is_not_compiled_says_why(
    fields: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tiny = load_tiny(tmp_path)
    settings = TargetSettings(model=str(tmp_path), device="cpu", compile="auto", **fields)
    assert adopt_or_plan(settings, load_target(settings), tiny.engine) is None
    assert reason in caplog.text
    with pytest.raises(ConfigurationError, match=reason):
        build.build(settings)


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    target = load_target(TargetSettings(model=str(tiny_target(tmp_path)), device="cpu"))
    with pytest.raises(ConfigurationError, match=r"install g\+\+"):
        build.compile_pass(target, tmp_path / "a")


@needs_compiler
def test_a_model_that_cannot_be_traced_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", "llama4")
    loaded = load_target(TargetSettings(model=str(target), device="cpu", dtype="float32"))
    with pytest.raises(ConfigurationError, match="cannot be compiled"):
        build.compile_pass(loaded, tmp_path / "made" / "a")
    assert list((tmp_path / "made").iterdir()) == []


@needs_compiler
def test_a_service_compiles_beside_serving_and_takes_its_compiler_along(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = {
        "TMPDIR": str(temporary),
        "FLASHDUET_CACHE": str(tmp_path / "cache"),
        "FLASHDUET_TARGET_LISTEN": f"unix:{tmp_path}/target.sock",
        "FLASHDUET_TARGET_DTYPE": "bfloat16",
    }
    model = str(tiny_target(tmp_path / "target"))
    process = start(model, **variables)
    assert process.stderr is not None
    log = _until(process.stderr, "compiling in the background")
    assert "serving" in log
    children = _children(process.pid)
    assert children
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=END_S)
    assert process.returncode == 0
    _, alive = psutil.wait_procs(children, timeout=END_S)
    assert not alive

    process = start(model, **variables)
    assert process.stderr is not None
    try:
        _until(process.stderr, "steps run compiled")
    finally:
        process.kill()
        process.communicate(timeout=END_S)
    (package,) = (tmp_path / "cache" / "compiled").iterdir()
    assert package.is_dir()
    (library,) = (tmp_path / "cache" / "native").iterdir()
    assert library.suffix == ".so"
    assert list(temporary.iterdir()) == [], "a start leaves nothing behind, however it ends"


def _until(stream, text: str) -> str:  # type: ignore[no-untyped-def]
    """Lines up to the first one that has the text."""
    log, deadline = "", time.monotonic() + START_S
    while text not in log:
        assert time.monotonic() < deadline, log
        line = stream.readline()
        assert line, log
        log += line
    return log


def _children(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + END_S
    while not (found := psutil.Process(pid).children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def _step(tiny: TinyTarget, session, expected: list[int], drafts: int) -> None:  # type: ignore[no-untyped-def]
    anchor = session.anchor_position
    run_one(
        tiny.engine, VerifyBlock(session, anchor, expected[anchor + 1 : anchor + 1 + drafts], (0,))
    )


def _features(tiny: TinyTarget, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Of a new session's first tokens."""
    session = tiny.session(tokens)
    result = prefill(tiny.engine, session, 8, layers)[-1]
    assert result.context is not None
    return result.context.features
