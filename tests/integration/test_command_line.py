"""The command line over real services, as a user's shell runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.pair import PATIENCE, wait_until
from tests.support.tiny import tiny_drafter, tiny_target

COMMAND = [sys.executable, "-m", "flashduet_cli"]
# Loading torch three times on a busy machine.
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """Options that name a tiny pair."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target(folder / "target", max_position_embeddings=2048)
    drafter = tiny_drafter(folder / "drafter", target, max_position_embeddings=2048)
    return ["--model", str(target), "--drafter", str(drafter)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"id": f"p/{n}", "turns": [text]} for n, text in enumerate(("hello there", "a b c d"))]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def flashduet(*arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **PATIENCE},
        **settings,
    )


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_generate_starts_a_stack_of_its_own(models):
    result = flashduet(
        *("generate", "--json", "--start", "--max-tokens", "12"),
        *("--temperature", "20", "--seed", "5", "--block-length", "4", "--dtype", "float32"),
        *models,
        input="hello",
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 12
    assert answer["rounds"] > 0
    assert answer["acceptance_length"] >= 1
    assert {"prefill", "propose", "verify", "accept"} <= set(answer["phases"])
    assert "starting" in result.stderr


def test_up_serves_restarts_its_draft_and_leaves_nothing_behind(models):
    up = subprocess.Popen(
        [*COMMAND, "up", "--free-ports", *models], stderr=subprocess.PIPE, text=True
    )
    try:
        endpoint = ""
        assert up.stderr is not None
        for line in up.stderr:
            if found := re.search(r"ready: gRPC on (\S+),", line):
                endpoint = found.group(1)
                break
        assert endpoint, "it ended before it was ready"
        children = psutil.Process(up.pid).children(recursive=True)
        assert len(children) == 3
        listed = flashduet("models", "list", "--json", "--endpoint", endpoint)
        assert json.loads(listed.stdout)["served"][0]["drafter"] == "drafter"
        (draft,) = [child for child in children if "draft_service" in child.cmdline()]
        draft.send_signal(signal.SIGKILL)
        lines = []
        for line in up.stderr:
            lines.append(line)
            if "draft" in line and "serving drafter" in line:
                break
        assert any("starting it again" in line for line in lines)
        children = psutil.Process(up.pid).children(recursive=True)
        up.send_signal(signal.SIGTERM)
        rest = up.stderr.read()
        assert up.wait(TIMEOUT_S) == 0, rest
        assert not any(map(is_running, children))
    finally:
        up.kill()
        up.wait(10)


def test_kill_9_of_the_command_while_it_loads_leaves_no_process(models):
    up = subprocess.Popen(
        [*COMMAND, "up", "--free-ports", *models],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[psutil.Process] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(children) < 3 and time.monotonic() < deadline:
        children = psutil.Process(up.pid).children(recursive=True)
        time.sleep(0.05)
    os.kill(up.pid, signal.SIGKILL)
    up.wait(10)
    assert len(children) >= 3
    wait_until(lambda: not any(map(is_running, children)), "the services to follow their command")


GREEDY = ["--block-lengths", "4", "--official"]
HOT = ["--temperature", "60", "--seed", "7", "--random-drafter"]


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        (GREEDY, {"off", "draft", "block-4", "transformers", "dflash"}),
        (HOT, {"off", "draft", "random-drafter"}),
    ],
    ids=["greedy", "hot"],
)
def test_check_lossless_passes_on_a_tiny_pair(models, prompts, options, modes):
    result = flashduet(
        *("check", "lossless", "--prompts", str(prompts), "--max-tokens", "24", "--json"),
        *("--threads", "1"),
        *options,
        *models,
    )
    report = json.loads(result.stdout)
    assert result.returncode == 0, result.stderr
    assert report["passed"] is True
    assert report["identical"] + len({tie["prompt_id"] for tie in report["near_ties"]}) == 2
    assert set(report["modes"]) == modes
    assert report["modes"]["draft"]["drafted_tokens"] > 0
    if options is HOT:
        assert report["acceptance_length"] > 1, "under strong noise both follow the same noise"
    else:
        ours, official = report["modes"]["draft"], report["modes"]["dflash"]
        assert official["rounds"] == ours["rounds"], "the same drafter gets the same rounds"


def test_the_official_package_is_compared_greedily_only(models, prompts):
    sampled = ("--official", "--temperature", "0.8")
    result = flashduet("check", "lossless", "--prompts", str(prompts), *sampled, *models)
    assert result.returncode == 2
    assert "greedy only" in result.stderr
