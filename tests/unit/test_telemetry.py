"""Spans: one trace from process to process, OTLP/JSON on disk, nothing without an exporter."""

import json
import os
import subprocess
import sys
import time

import pytest

PROGRAM = """
import time
from flashduet import telemetry
from opentelemetry import trace
from opentelemetry.context import Context
recording = telemetry.setup("gateway")
root = telemetry.tracer().start_span("root", context=Context())
parent = trace.set_span_in_context(root, Context())
header = telemetry.traceparent(parent)
remote = telemetry.context_of(header)
now = time.time_ns()
telemetry.record_span("phase", remote, now - 2_000_000, now, {"rows": 3})
root.end()
telemetry.shutdown()
print(recording, header)
"""


def run(**environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_spans_go_to_otlp_json_lines(tmp_path):
    out = run(FLASHDUET_TRACE_DIR=str(tmp_path))
    assert out.startswith("True 00-")
    (file,) = tmp_path.glob("gateway-*.jsonl")
    spans = {
        span["name"]: span
        for line in file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    assert set(spans) == {"root", "phase"}
    trace_id = out.split("-")[1]
    assert spans["root"]["traceId"] == spans["phase"]["traceId"] == trace_id
    assert spans["phase"]["parentSpanId"] == spans["root"]["spanId"]
    duration = int(spans["phase"]["endTimeUnixNano"]) - int(spans["phase"]["startTimeUnixNano"])
    assert duration == 2_000_000


def test_nothing_is_recorded_without_an_exporter():
    assert run().split() == ["False"]


def test_an_unknown_exporter_is_refused_by_name(monkeypatch):
    from flashduet import telemetry
    from flashduet.errors import ConfigurationError

    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigurationError, match="zipkin"):
        telemetry.setup("gateway")


def test_recording_without_a_parent_is_cheap():
    from flashduet import telemetry

    start = time.thread_time()
    for _ in range(1_000):
        assert telemetry.record_span("phase", None, 0, 1) is None
    assert time.thread_time() - start < 0.5
