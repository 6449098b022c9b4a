"""A file of prompts over real engines, through a run that is killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

from flashduet.client import Client
from tests.support.pair import Pair

PROMPTS = 40
TIMEOUT_S = 600


def command(pair: Pair, file: Path, out: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "flashduet_cli", "generate", "--endpoint", pair.gateway),
        *("--file", str(file), "--out", str(out), "--max-tokens", "24", "--concurrency", "3"),
    ]


def test_a_killed_run_is_taken_up_again_and_every_prompt_answered_as_alone(
    pair: Pair, tmp_path: Path
):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = [f"prompt number {n}" for n in range(PROMPTS)]
    file.write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in texts))
    first = subprocess.Popen(command(pair, file, out), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first.kill()
    first.wait(60)
    kept = out.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    pair.assert_nothing_left()

    done = subprocess.run(
        command(pair, file, out), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert "are answered in" in done.stderr
    whole = out.read_bytes()
    assert whole.startswith(kept), "what was answered before is as it was"
    entries = [json.loads(line) for line in whole.decode().splitlines()]
    assert len(entries) == PROMPTS
    assert {entry["id"] for entry in entries} == set(texts)
    with Client(pair.gateway) as client:
        for entry in entries[:: PROMPTS // 8]:
            alone = client.generate(entry["id"], max_tokens=24).result()
            assert entry["answers"][0]["token_ids"] == alone.token_ids
    pair.assert_nothing_left()
