"""Reading back the traces that FLASHDUET_TRACE_DIR wrote: OTLP/JSON, one batch a line."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashduet.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times in nanoseconds since the epoch, ids in hex, `parent_id` empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, object]

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True)
class Trace:
    """The spans of one request, by parent, each list in order of start."""

    trace_id: str
    children: Mapping[str, list[Span]]

    @property
    def roots(self) -> list[Span]:
        """Spans whose parent is not among the spans read (of another process, or cut off)."""
        known = {span.span_id for spans in self.children.values() for span in spans}
        found = [
            span for parent, spans in self.children.items() if parent not in known for span in spans
        ]
        return sorted(found, key=lambda span: span.start_ns)

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for spans in self.children.values() for span in spans)


def read_traces(place: Path) -> list[Trace]:
    """All traces in a file or in a folder's *.jsonl files, in order of start.

    A line that a killed process left unfinished is skipped.

    Raises:
        ConfigurationError: no such file or folder, or no spans in it.
    """
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    by_trace: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigurationError(f"{file}: {error.strerror}") from error
        for span in _spans(lines):
            by_trace[span.trace_id][span.parent_id].append(span)
    if not by_trace:
        raise ConfigurationError(
            f"{place}: no spans; were the services run with FLASHDUET_TRACE_DIR?"
        )
    for children in by_trace.values():
        for spans in children.values():
            spans.sort(key=lambda span: span.start_ns)
    traces = [Trace(trace_id, children) for trace_id, children in by_trace.items()]
    return sorted(traces, key=lambda trace: trace.start_ns)


def _spans(lines: Iterable[str]) -> Iterator[Span]:
    for line in lines:
        try:
            batch = json.loads(line)
        except ValueError:
            continue
        for resource in batch.get("resourceSpans", []):
            about = _attributes(resource.get("resource", {}).get("attributes", []))
            service = str(about.get("flashduet.role") or about.get("service.name", ""))
            for scope in resource.get("scopeSpans", []):
                for span in scope.get("spans", []):
                    yield Span(
                        trace_id=span["traceId"],
                        span_id=span["spanId"],
                        parent_id=span.get("parentSpanId", ""),
                        name=span["name"],
                        service=service,
                        start_ns=int(span["startTimeUnixNano"]),
                        end_ns=int(span["endTimeUnixNano"]),
                        attributes=_attributes(span.get("attributes", [])),
                    )


def _attributes(pairs: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """OTLP's tagged values, untagged; 64-bit integers are strings in JSON."""
    values: dict[str, object] = {}
    for pair in pairs:
        for kind, value in pair.get("value", {}).items():
            values[pair["key"]] = int(value) if kind == "intValue" else value
    return values
