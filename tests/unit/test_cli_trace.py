"""Traces read back from the files that the services write."""

import json
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flashduet import telemetry
from flashduet.errors import ConfigurationError
from flashduet_cli.main import app
from flashduet_cli.trace_command import tree
from flashduet_cli.trace_files import read_traces


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two requests as the services' own exporter writes them, the second with three rounds."""
    monkeypatch.setenv(telemetry.TRACE_DIR_VARIABLE, str(tmp_path))
    for name in ("_provider", "_tracer"):
        monkeypatch.setattr(telemetry, name, getattr(telemetry, name))
    assert telemetry.setup("gateway")
    now = time.time_ns()
    for start, rounds in ((now, 1), (now + 10**9, 3)):
        with telemetry.tracer().start_as_current_span("flashduet.request") as root:
            context = telemetry.trace.set_span_in_context(root)
            telemetry.record_span("admit", context, start, start + 2_000_000)
            for number in range(1, rounds + 1):
                begin = start + number * 10_000_000
                telemetry.record_span(
                    "round", context, begin, begin + 5_000_000, {"round": number, "accepted": 2}
                )
    telemetry.shutdown()
    return tmp_path


def shown(trace, rounds) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(tree(trace, rounds))
    return capture.get()


def test_spans_are_read_with_their_times_parents_and_attributes(folder):
    first, second = read_traces(folder)
    (root,) = second.roots
    assert (root.name, root.service) == ("flashduet.request", "gateway")
    names = [span.name for span in second.children[root.span_id]]
    assert names == ["admit", "round", "round", "round"]
    admit, *rounds = second.children[root.span_id]
    assert admit.milliseconds == pytest.approx(2.0)
    assert [span.attributes["round"] for span in rounds] == [1, 2, 3]
    assert first.start_ns < second.start_ns


def test_the_tree_shows_each_phase_and_sums_up_rounds_past_the_limit(folder):
    _, trace = read_traces(folder)
    text = shown(trace, 1)
    assert trace.trace_id in text
    assert "admit" in text
    assert "2.00 ms" in text
    assert "round=1  accepted=2" in text
    assert "round=2" not in text
    assert "2 more rounds, 10.0 ms" in text
    assert "round=3" in shown(trace, None)


def test_an_unfinished_line_of_a_killed_process_is_skipped(folder):
    (file,) = folder.glob("*.jsonl")
    whole = len(read_traces(folder))
    file.write_text(file.read_text() + '{"resourceSpans": [{"sco')
    assert len(read_traces(file)) == whole


def test_a_trace_is_found_by_the_beginning_of_its_id(folder):
    first, last = read_traces(folder)
    result = CliRunner().invoke(app, ["trace", "show", str(folder)])
    assert last.trace_id in result.stdout
    result = CliRunner().invoke(
        app, ["trace", "show", str(folder), "--trace-id", first.trace_id[:9]]
    )
    assert first.trace_id in result.stdout
    result = CliRunner().invoke(app, ["trace", "show", str(folder), "--trace-id", "zz"])
    assert result.exit_code == 1


def test_a_place_without_spans_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="FLASHDUET_TRACE_DIR"):
        read_traces(tmp_path)
    with pytest.raises(ConfigurationError, match=r"none\.jsonl"):
        read_traces(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text(json.dumps({"resourceSpans": []}))
    with pytest.raises(ConfigurationError, match="no spans"):
        read_traces(tmp_path)
