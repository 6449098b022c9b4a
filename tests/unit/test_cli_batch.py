"""Files of prompts: every prompt gets its line, once, whatever happened to the run before."""

import asyncio
import fcntl
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashduet import errors
from flashduet.v1 import gateway_pb2 as pb
from flashduet_cli.batch import run
from flashduet_cli.main import app
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway


@pytest.fixture
def gateway():
    with scripted_gateway() as (endpoint, servicer):
        yield endpoint, servicer


def answer(endpoint: str, file: Path, out: Path, *arguments: str):
    return CliRunner().invoke(
        app,
        ["generate", "--endpoint", endpoint, "--file", str(file), "--out", str(out), *arguments],
    )


def write(file: Path, *entries: object) -> Path:
    file.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    return file


def read(file: Path) -> dict[str, dict]:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    found = {entry["id"]: entry for entry in entries}
    assert len(found) == len(entries), "one line a prompt"
    return found


def contents(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def test_every_kind_of_prompt_is_answered(gateway, tmp_path):
    endpoint, servicer = gateway
    file = write(
        tmp_path / "prompts.jsonl",
        {"id": "a", "prompt": "one\u2028line"},
        {"id": 7, "turns": ["first", "second"]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    )
    out = tmp_path / "answers.jsonl"
    result = answer(endpoint, file, out, "--system", "be brief", "--max-tokens", "9", "--json")
    assert result.exit_code == 0, result.output
    found = read(out)
    assert set(found) == {"a", "7", "3"}
    assert [a["text"] for a in found["7"]["answers"]] == ["héllo", "héllo"]
    (whole,) = found["a"]["answers"]
    assert whole["token_ids"] == [4, 5, 6, 7]
    assert (whole["finish_reason"], whole["cached_tokens"]) == ("stop", 1)
    assert whole["seed"] == str(2**63 + 1)
    asked = [contents(request) for request in servicer.requests]
    system = ("system", "be brief")
    assert [system, ("user", "one\u2028line")] in asked
    follow_up = [("user", "first"), ("assistant", "héllo"), ("user", "second")]
    assert [system, *follow_up] in asked
    assert [system, ("user", "x"), ("assistant", "y")] in asked
    assert {request.priority for request in servicer.requests} == {2}
    assert {request.max_tokens for request in servicer.requests} == {9}
    totals = json.loads(result.stdout)
    assert (totals["answered"], totals["failed"], totals["tokens"]) == (3, 0, 16)


def test_a_second_run_asks_only_for_what_is_missing(gateway, tmp_path):
    """Failed prompts are tried again, and a last line that was cut off is as if never begun."""
    endpoint, servicer = gateway
    file = write(tmp_path / "p", *({"id": f"p{n}", "prompt": f"text {n}"} for n in range(4)))
    out = tmp_path / "answers.jsonl"
    done = json.dumps({"id": "p0", "answers": [], "seconds": 1.0}) + "\n"
    failed = json.dumps({"id": "p1", "error": {"type": "X", "message": "y"}}) + "\n"
    out.write_text(done + failed + done.replace("p0", "p2")[:-9])
    assert answer(endpoint, file, out).exit_code == 0
    assert set(read(out)) == {"p0", "p1", "p2", "p3"}
    assert out.read_text().startswith(done)
    assert len(servicer.requests) == 3
    before = out.read_bytes()
    again = answer(endpoint, file, out)
    assert again.exit_code == 0
    assert "4 of 4 prompts are answered" in again.stderr
    assert (len(servicer.requests), out.read_bytes()) == (3, before)
    assert not (tmp_path / "answers.jsonl.new").exists()


def test_a_cut_line_after_good_ones_is_repaired_in_place(gateway, tmp_path):
    endpoint, _ = gateway
    file = write(tmp_path / "p", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"})
    out = tmp_path / "o"
    done = json.dumps({"id": "a", "answers": []}) + "\n"
    out.write_text(done + '{"id": "b", "ans')
    inode = out.stat().st_ino
    assert answer(endpoint, file, out).exit_code == 0
    assert out.stat().st_ino == inode
    assert set(read(out)) == {"a", "b"}


def test_a_prompt_that_is_refused_has_its_line_and_the_run_its_status(gateway, tmp_path):
    endpoint, _ = gateway
    file = write(tmp_path / "p", {"prompt": "bad"}, {"prompt": "good"}, {"prompt": "cut"})
    out = tmp_path / "o"
    result = answer(endpoint, file, out)
    assert result.exit_code == 1
    assert "2 of 3 prompts failed" in result.stderr
    found = read(out)
    assert found["1"]["error"]["message"] == "temperature: -1 given, must be >= 0"
    assert "before the answer was complete" in found["3"]["error"]["message"]
    assert found["2"]["answers"][0]["text"] == "héllo"


class Full(ScriptedGateway):
    """Has room for two, and says so to the others; from time to time it is not there at all."""

    def __init__(self) -> None:
        super().__init__()
        self.active = self.most = self.refused = 0
        self.absent = 3

    async def Generate(self, request, context):
        if self.absent:
            self.absent -= 1
            raise errors.Unavailable("starting", 0.01)
        if self.active == 2:
            self.refused += 1
            raise errors.Overloaded("full", 30.0)
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await asyncio.sleep(0.01)
            async for response in super().Generate(request, context):
                yield response
        finally:
            self.active -= 1


def test_a_full_gateway_is_asked_again_as_soon_as_there_is_room(tmp_path):
    """Waiting the 30 seconds that it says would be waiting for nothing: our own answers end."""
    with scripted_gateway(Full()) as (endpoint, servicer):
        file = write(tmp_path / "p", *({"prompt": str(n)} for n in range(20)))
        result = answer(endpoint, file, tmp_path / "o", "--concurrency", "8")
        assert result.exit_code == 0, result.output
        assert len(read(tmp_path / "o")) == 20
        assert servicer.most == 2
        assert 0 < servicer.refused < 60


def test_a_gateway_that_goes_away_ends_the_run_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_PATIENCE_S", 0.2)

    class Leaving(ScriptedGateway):
        async def Generate(self, request, context):
            if len(self.requests) == 2:
                raise errors.Unavailable("gone", 0.05)
            async for response in super().Generate(request, context):
                yield response

    with scripted_gateway(Leaving()) as (endpoint, _):
        file = write(tmp_path / "p", *({"prompt": str(n)} for n in range(5)))
        result = answer(endpoint, file, tmp_path / "o", "--concurrency", "1")
    assert result.exit_code == 1
    assert "gone" in result.stderr
    assert set(read(tmp_path / "o")) == {"1", "2"}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 2"),
        ("[1]", "a JSON object"),
        ('{"id": 1.5, "prompt": "x"}', '"id" must be'),
        ('{"id": "a", "prompt": "x"}', "a second 'a'"),
        ('{"prompt": "x", "turns": ["y"]}', "exactly one of"),
        ("{}", "exactly one of"),
        ('{"prompt": 3}', '"prompt" must be a string'),
        ('{"turns": []}', '"turns" must be a list of at least one'),
        ('{"turns": "x"}', '"turns" must be a list'),
        ('{"messages": [{"role": "user"}]}', 'must have "role" and "content"'),
        ('{"messages": []}', "at least one message"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(gateway, tmp_path, line, part):
    endpoint, servicer = gateway
    file = tmp_path / "p"
    file.write_text('{"id": "a", "prompt": "x"}\n' + line)
    result = answer(endpoint, file, tmp_path / "o")
    assert result.exit_code == 1
    assert "line 2" in result.stderr
    assert part in result.stderr
    assert not servicer.requests


def test_files_that_cannot_be_used_are_refused_by_name(gateway, tmp_path):
    endpoint, _ = gateway
    file = write(tmp_path / "p", {"prompt": "x"})
    foreign = tmp_path / "notes.txt"
    foreign.write_text("dear diary\n")
    missing = tmp_path / "no" / "o"
    for result, part in (
        (answer(endpoint, tmp_path / "none", tmp_path / "o"), "--file"),
        (answer(endpoint, file, foreign), "not an answer of this command"),
        (answer(endpoint, file, missing), "--out"),
    ):
        assert result.exit_code == 1
        assert part in result.stderr
    assert foreign.read_text() == "dear diary\n"
    with (tmp_path / "o").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = answer(endpoint, file, tmp_path / "o")
    assert "another run is writing it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["hello", "--file", "p", "--out", "o"], "either a prompt or --file"),
        (["--file", "p"], "belong together"),
        (["hello", "--out", "o"], "belong together"),
    ],
)
def test_options_that_exclude_each_other(arguments, part):
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code == 2
    assert part in result.stderr


def test_raw_prompts_are_taken_as_they_are(gateway, tmp_path):
    endpoint, servicer = gateway
    file = write(tmp_path / "p", {"prompt": "as it is"})
    assert answer(endpoint, file, tmp_path / "o", "--raw").exit_code == 0
    assert [request.text for request in servicer.requests] == ["as it is"]
    chat = write(tmp_path / "c", {"id": "talk", "turns": ["a", "b"]})
    result = answer(endpoint, chat, tmp_path / "o2", "--raw")
    assert result.exit_code == 2
    assert "'talk' is a conversation" in result.stderr


def test_an_endpoint_that_was_named_and_does_not_answer_is_an_error():
    result = CliRunner().invoke(app, ["generate", "hi", "--endpoint", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1: no gateway answers there" in result.stderr
    assert "flashduet up" in result.stderr
