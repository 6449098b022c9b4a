"""What a stranger does with the command: odd bytes, wrong addresses, odd terminals, Ctrl-C."""

import importlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from typer.testing import CliRunner

from flashduet_cli.doctor_setup import setup_checks
from flashduet_cli.main import app
from tests.support.scripted_gateway import scripted_gateway


@pytest.fixture
def gateway():
    with scripted_gateway() as (endpoint, servicer):
        yield endpoint, servicer


def flashduet(*arguments: str, stdin: bytes | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_bytes_that_are_no_text_are_refused_by_name(gateway):
    endpoint, servicer = gateway
    at = ("--endpoint", endpoint)
    # What Python makes of a byte in an argument that the locale's encoding does not have.
    lone = b"caf\xe9".decode("utf-8", "surrogateescape")
    for result, name in (
        (flashduet("generate", *at, stdin=b"\xff\xfe hi"), "the prompt"),
        (flashduet("generate", lone, *at), "the prompt"),
        (flashduet("generate", "hi", "--system", lone, *at), "--system"),
        (flashduet("generate", "hi", "--stop", lone, *at), "--stop"),
    ):
        assert result.exit_code == 2
        assert f"{name} is not UTF-8" in result.stderr
    assert not servicer.requests


def test_utf_8_arrives_whatever_the_locale_made_of_it(gateway):
    endpoint, servicer = gateway
    argument = "café".encode().decode("ascii", "surrogateescape")
    assert flashduet("generate", argument, "--endpoint", endpoint).exit_code == 0
    assert flashduet("generate", "--endpoint", endpoint, stdin="café".encode()).exit_code == 0
    contents = [request.chat.messages[0].content for request in servicer.requests]
    assert contents == ["café", "café"]


def test_a_terminal_without_a_character_gets_the_rest_of_the_answer(gateway):
    endpoint, _ = gateway
    done = subprocess.run(
        [sys.executable, "-m", "flashduet_cli", "generate", "hi", "--endpoint", endpoint],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"h?llo\n"


def test_only_a_sampled_answer_tells_its_seed(gateway):
    endpoint, _ = gateway
    greedy = flashduet("generate", "hi", "--endpoint", endpoint)
    sampled = flashduet("generate", "hi", "--temperature", "0.5", "--endpoint", endpoint)
    assert "seed" not in greedy.stderr
    assert "seed" in sampled.stderr


def test_a_running_stack_is_asked_for_the_model_by_its_served_name(gateway, tmp_path):
    endpoint, servicer = gateway
    for model in ("default", "org/name", str(tmp_path)):
        flashduet("generate", "hi", "--model", model, "--endpoint", endpoint)
    served = [request.model for request in servicer.requests]
    assert served == ["smollm2-135m-instruct", "org/name", tmp_path.name]


def test_a_cached_folder_is_listed_on_one_line_to_be_copied(gateway, tmp_path, monkeypatch):
    endpoint, _ = gateway
    folder = tmp_path / "models" / f"{'long-name-' * 4}0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path))
    assert str(folder) in flashduet("models", "list", "--endpoint", endpoint).stdout


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:8000/v1", "localhost"])
@pytest.mark.parametrize("command", [["generate", "hi"], ["models", "list"]])
def test_what_is_no_grpc_address_is_refused(command, endpoint):
    result = flashduet(*command, "--endpoint", endpoint)
    assert result.exit_code == 1
    assert f"--endpoint {endpoint}" in result.stderr
    assert "host:port" in result.stderr


def test_another_grpc_service_is_not_taken_for_a_gateway():
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        result = flashduet("generate", "hi", "--endpoint", endpoint)
    finally:
        server.stop(None)
    assert result.exit_code == 1
    assert f"--endpoint {endpoint}" in result.stderr
    assert "no Flashduet gateway" in result.stderr


@pytest.mark.parametrize(("body", "status"), [({"status": "ok"}, "OK"), ({"hello": 1}, "WARN")])
def test_doctor_tells_our_http_side_from_a_strangers(body, status, monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("FLASHDUET_GATEWAY_HTTP_LISTEN", f"127.0.0.1:{server.server_port}")
        (http,) = [check for check in setup_checks() if check.name == "http"]
        server.shutdown()
    assert http.status == status
    assert ("--free-ports" in http.fix) == (status == "WARN")


def test_ctrl_c_while_the_command_loads_is_quiet(monkeypatch):
    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "flashduet_cli.main":
                raise KeyboardInterrupt

    entry = importlib.import_module("flashduet_cli.__main__")
    monkeypatch.delitem(sys.modules, "flashduet_cli.main")
    monkeypatch.setattr("sys.meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
