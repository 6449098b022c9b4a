"""`flashduet bench engine` over a tiny pair: rows through a stack and rows in process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashduet_cli.main import app

ROWS = ("ttft", "round", "sampling", "leaks")


@pytest.mark.slow
def test_rows_are_measured_and_leave_nothing_behind(tiny_models: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "table.json", tmp_path / "table.png"
    pytest.importorskip("matplotlib")
    arguments = ["--quick", "--dtype", "float32", "--threads", "1", "--only", ",".join(ROWS)]
    arguments += ["--model", str(tiny_models / "target"), "--drafter", str(tiny_models / "drafter")]
    result = CliRunner().invoke(
        app, ["bench", "engine", *arguments, "--out", str(out), "--plot", str(picture)]
    )
    # A tiny random pair reaches no floor; every row must have its figure all the same.
    assert result.exit_code in (0, 1), result.output
    rows = {row["row"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == set(ROWS)
    assert not any("error" in row for row in rows.values()), rows
    assert rows["leaks"]["value"] == 0, rows["leaks"]
    assert rows["leaks"]["details"]["refused"] == 0, rows["leaks"]
    assert rows["round"]["details"]["draft_forward_ms"][0] > 0
    assert picture.stat().st_size > 0
