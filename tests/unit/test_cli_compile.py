"""`flashduet models compile`: where the file went, or why there is none."""

import json

from typer.testing import CliRunner

from flashduet_cli.main import app
from tests.support.tiny import tiny_target
from tests.unit.test_target_compiled import needs_compiler


def compile_model(*arguments: str):
    return CliRunner().invoke(app, ["models", "compile", *arguments])


def test_what_is_not_compiled_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path / "cache"))
    folder = str(tiny_target(tmp_path / "target"))
    result = compile_model(folder, "--dtype", "float32")
    assert result.exit_code == 1
    assert "in float32 passes stay as they are" in result.stderr
    assert result.stdout == ""
    missing = compile_model(str(tmp_path / "nothing"))
    assert missing.exit_code == 1
    assert "no such folder" in missing.stderr


@needs_compiler
def test_the_file_is_told_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHDUET_CACHE", str(tmp_path / "cache"))
    folder = str(tiny_target(tmp_path / "target"))
    told = [json.loads(compile_model(folder, "--threads", "1", "--json").stdout) for _ in range(2)]
    assert told[0] == told[1]
    assert told[0]["file"].startswith(str(tmp_path / "cache" / "compiled"))
    made = list((tmp_path / "cache" / "compiled").iterdir())
    assert [str(path) for path in made] == [told[0]["file"]]
