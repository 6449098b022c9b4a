"""The example clients do what their README says, and agree with each other."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pair import Pair

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DESCRIPTORS = EXAMPLES.parent / "flashduet" / "v1" / "flashduet.v1.binpb"
# A seed that neither a double nor a signed integer holds.
SEED = 2**64 - 1
ASK = ["hello", "--max-tokens", "12", "--temperature", "3", "--seed", str(SEED)]
TIMEOUT_S = 600
# What npm says where the registry cannot be reached; anything else is a mistake of ours.
UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH")


def run(command: list[str], folder: Path = EXAMPLES) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)


def python_client(pair: Pair, *options: str) -> subprocess.CompletedProcess[str]:
    client = [sys.executable, "python_client.py", "--address", pair.gateway]
    return run([*client, *options])


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/node with the packages of its lock file."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("examples") / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund"]
    install = run([npm, "ci", *quiet, "--fetch-retries", "1", "--fetch-timeout", "60000"], folder)
    if any(code in install.stderr for code in UNREACHABLE):
        pytest.skip("npm reaches no registry")
    assert install.returncode == 0, install.stderr[-2000:]
    return folder


def node_client(pair: Pair, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    client = ["node", "client.mjs", "--address", pair.gateway, "--descriptors", str(DESCRIPTORS)]
    return run([*client, *options], folder)


def answer_of(finished: subprocess.CompletedProcess[str]) -> dict:
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_python_and_node_get_the_same_answers(pair: Pair, node_folder: Path):
    options = [*ASK, "--choices", "2", "--top-logprobs", "1"]
    ours = answer_of(python_client(pair, *options))
    theirs = answer_of(node_client(pair, node_folder, *options))
    for our, their in zip(ours["choices"], theirs["choices"], strict=True):
        # Choices that shared a step, or did not, round differently.
        assert their.pop("logprobs") == pytest.approx(our["logprobs"], abs=1e-4)
        assert their == {key: value for key, value in our.items() if key != "logprobs"}
    assert int(theirs["seed"]) == ours["seed"] == SEED
    assert [len(choice["token_ids"]) for choice in ours["choices"]] == [12, 12]
    assert [len(choice["logprobs"]) for choice in ours["choices"]] == [12, 12]
    assert ours["choices"][0]["token_ids"] != ours["choices"][1]["token_ids"]
    assert {choice["finish_reason"] for choice in ours["choices"]} == {"FINISH_REASON_LENGTH"}
    assert theirs["completion_tokens"] == ours["completion_tokens"] == 24


def test_a_refusal_is_told_by_its_field(pair: Pair, node_folder: Path):
    for refused in (
        python_client(pair, *ASK, "--max-tokens", "100000"),
        node_client(pair, node_folder, *ASK, "--max-tokens", "100000"),
    ):
        assert refused.returncode == 1
        assert refused.stdout == ""
        assert "INVALID_ARGUMENT: max_tokens" in refused.stderr
