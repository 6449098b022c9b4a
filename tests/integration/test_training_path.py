"""A newcomer's path: a drafter for a target that nobody trained for, by two commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny import tiny_target

COMMAND = [sys.executable, "-m", "flashduet_cli"]


def run(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == expect, done.stderr
    return done


def untrained_target(folder: Path) -> Path:
    """A random model as its family initializes it: its answers loop, so they can be learnt."""
    tiny_target(folder)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_drafter_is_trained_served_and_better_than_an_untrained_one(tmp_path: Path) -> None:
    target, out = untrained_target(tmp_path / "target"), tmp_path / "out"
    train = ["train", "--target", str(target), "--preset", "smoke", "--out", str(out)]
    train += ["--answer-tokens", "2500"]
    made = run(*train)
    drafter = Path(made.stdout.strip())
    record = json.loads((out / "run/run.json").read_text())
    assert record["result"]["finished"]
    assert record["result"]["tau"] > record["tau_before"] + 0.5
    assert record["facts"]["data"][0]["answer_tokens"] >= 2500
    assert json.loads((drafter / "flashduet.json").read_text())["self_test"]["expected_tau"] > 1

    again = run(*train, expect=1)
    assert "--resume" in again.stderr

    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": str(n), "category": "ab"[n % 2], "turns": [f"say {n}"]} for n in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pair = ["--model", str(target), "--drafter", str(drafter)]
    arguments = ["--max-tokens", "24", "--dtype", "float32", "--threads", "1", "--json"]
    report = json.loads(run("eval", "--prompts", str(prompts), *pair, *arguments).stdout)
    greedy = report["greedy"]
    assert greedy["overall"]["tau"] > 1.5
    assert set(greedy["by_category"]) == {"a", "b"}
    # In float32 decoding through the services takes the rounds that scoring finds.
    assert greedy["teacher_forced"]["answers_with_other_rounds"] == 0
    assert report["temperature_1"]["overall"]["answers"] == 4
