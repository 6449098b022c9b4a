"""The commands as a user types them."""

import json
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flashduet import __version__
from flashduet_cli.console import phase_table
from flashduet_cli.main import app
from tests.support.scripted_gateway import scripted_gateway

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "usage",
    "rounds",
    "acceptance_length",
    "seconds",
    "tokens_per_second",
    "phases",
}


@pytest.fixture
def gateway():
    with scripted_gateway() as (endpoint, servicer):
        yield endpoint, servicer


def flashduet(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_generate_prints_the_text_and_tells_the_rest_on_stderr(gateway):
    endpoint, _ = gateway
    result = flashduet("generate", "hi", "--endpoint", endpoint)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "héllo\n"
    assert "4 tokens in" in result.stderr
    assert "acceptance length 1.50" in result.stderr
    assert "2 of 7 drafted tokens accepted" in result.stderr
    assert "where the time went" in result.stderr


def test_generate_json_is_one_object_with_exactly_these_keys(gateway):
    endpoint, _ = gateway
    result = flashduet("generate", "hi", "--json", "--endpoint", endpoint)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert set(answer) == KEYS
    assert answer["token_ids"] == [4, 5, 6, 7]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 1}
    assert answer["phases"]["verify.forward"] == 0.25
    assert answer["tokens_per_second"] == pytest.approx(4 / answer["seconds"])


def test_generate_sends_what_was_asked_for_and_nothing_else(gateway):
    endpoint, servicer = gateway
    flashduet("generate", "hi", "--endpoint", endpoint)
    flashduet(
        *("generate", "hi", "--endpoint", endpoint, "--max-tokens", "9", "--temperature", "0.5"),
        *("--top-p", "0.9", "--top-k", "7", "--seed", "3", "--block-length", "8", "--stop", "x"),
    )
    flashduet("generate", "hi", "--endpoint", endpoint, "--no-draft", "--system", "be brief")
    plain, full, undrafted = servicer.requests
    assert not plain.HasField("max_tokens")
    assert not plain.sampling.HasField("temperature")
    assert (full.max_tokens, full.sampling.temperature, full.sampling.top_k) == (9, 0.5, 7)
    assert (full.sampling.top_p, full.sampling.seed) == (0.9, 3)
    assert (full.speculation.mode, full.speculation.block_length) == (2, 8)
    assert list(full.stop) == ["x"]
    assert undrafted.speculation.mode == 3
    assert [message.role for message in undrafted.chat.messages] == ["system", "user"]


def test_generate_reads_the_prompt_from_standard_input(gateway):
    endpoint, servicer = gateway
    for arguments in ((), ("-",)):
        result = flashduet("generate", *arguments, "--endpoint", endpoint, stdin="two\nlines\n")
        assert result.exit_code == 0, result.stderr
        assert servicer.requests[-1].chat.messages[0].content == "two\nlines"
    empty = flashduet("generate", "--endpoint", endpoint, stdin="\n")
    assert empty.exit_code == 2
    assert "empty" in empty.stderr


@pytest.mark.parametrize("option", [["--dtype", "float32"], ["--device", "cpu"]])
def test_what_only_a_new_stack_can_have_is_refused_with_one_running(gateway, option):
    endpoint, servicer = gateway
    result = flashduet("generate", "hi", "--endpoint", endpoint, *option)
    assert result.exit_code == 2
    assert option[0] in result.stderr
    assert "flashduet up" in result.stderr
    assert not servicer.requests


def test_an_error_of_the_gateway_is_a_message_and_status_1(gateway):
    endpoint, _ = gateway
    result = flashduet("generate", "bad", "--json", "--endpoint", endpoint)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "temperature" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-draft", "--block-length", "4"],
        ["--raw", "--system", "x"],
        ["--block-length", "1"],
        ["--max-tokens", "0"],
    ],
)
def test_options_that_exclude_each_other_or_are_out_of_range(arguments):
    result = flashduet("generate", "hi", *arguments)
    assert result.exit_code == 2


@pytest.mark.parametrize("value", ["", "three", "3.5", "-1", "17"])
def test_evaluating_with_a_wrong_number_of_repeated_tokens_names_the_variable(
    monkeypatch, tmp_path, value
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["hi"]}\n')
    monkeypatch.setenv("FLASHDUET_DRAFT_LOOKUP", value)
    result = flashduet("eval", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "FLASHDUET_DRAFT_LOOKUP: Input should be" in result.stderr.replace("\n", " ")
    by_option = flashduet("eval", "--prompts", str(prompts), "--lookup", "17")
    assert by_option.exit_code == 2


def test_models_list_tells_what_is_served_and_what_is_cached(gateway, tmp_path, monkeypatch):
    endpoint, _ = gateway
    monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "some-model-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    result = flashduet("models", "list", "--json", "--endpoint", endpoint)
    assert result.exit_code == 0, result.stderr
    listed = json.loads(result.stdout)
    assert [model["id"] for model in listed["served"]] == ["tiny"]
    assert [(model["name"], model["bytes"]) for model in listed["cached"]] == [("some-model", 2)]
    plain = flashduet("models", "list", "--endpoint", endpoint)
    assert "tiny" in plain.stdout
    assert "some-model" in plain.stdout


def test_models_pull_of_nothing_names_the_fix():
    result = flashduet("models", "pull", "no such model")
    assert result.exit_code == 1
    assert "owner/name" in result.stderr


def test_doctor_looks_at_everything_and_gives_a_fix_for_what_is_amiss(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        monkeypatch.setenv("FLASHDUET_TARGET_LISTEN", taken)
        monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path / "empty"))
        result = flashduet("doctor", "--json")
    checks = json.loads(result.stdout)["checks"]
    by_name = {(check["area"], check["name"]): check for check in checks}
    areas = {check["area"] for check in checks}
    assert {"devices", "dtypes", "transports", "kernels", "versions", "models", "ports"} <= areas
    assert by_name["devices", "cpu"]["status"] == "OK"
    assert by_name["transports", "memfd"]["status"] == "OK"
    port = by_name["ports", "target"]
    assert port["status"] == "WARN"
    assert taken in port["detail"]
    assert "FLASHDUET_TARGET_LISTEN" in port["fix"]
    target = by_name["models", "default target"]
    assert (target["status"], "models pull" in target["fix"]) == ("WARN", True)
    assert all(check["fix"] for check in checks if check["status"] == "FAIL")
    assert result.exit_code == int(any(check["status"] == "FAIL" for check in checks))


def test_doctor_sees_a_kernel_that_refuses_sealed_memory(monkeypatch):
    def refuse(name: str, flags: int = 0) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    from flashduet_cli.doctor_machine import machine_checks

    (memfd,) = [check for check in machine_checks() if check.name == "memfd"]
    assert memfd.status == "WARN"
    assert "not permitted" in memfd.detail
    assert memfd.fix


def test_version_and_help():
    assert flashduet("--version").stdout == f"flashduet {__version__}\n"
    shown = flashduet("--help").stdout
    for command in ("up", "generate", "check", "models", "doctor"):
        assert command in shown


def test_phases_stand_in_the_order_in_which_they_happen_above_their_parts():
    phases = {"accept": 0.1, "verify.sample": 1.0, "new": 0.2, "verify.queue": 0.1, "verify": 3.0}
    table = phase_table(phases, 4.0)
    assert list(table.columns[0].cells) == ["verify", "  queue", "  sample", "accept", "new"]
    assert next(iter(table.columns[2].cells)) == "75.0 %"


def test_the_command_line_is_there_without_transformers():
    """No command should wait for what only a few of them need."""
    check = "import sys, flashduet_cli.main; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
