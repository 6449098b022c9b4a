"""Spans for every phase, in our own code.

Spans are exported as the standard OTEL_* variables say (OTEL_TRACES_EXPORTER, or an OTLP endpoint),
and besides to OTLP/JSON lines when FLASHDUET_TRACE_DIR is set. With neither, nothing is recorded
and a span costs next to nothing.

Phases are measured where they happen and recorded afterwards with explicit times, so that an
engine thread never holds a span open across a hand-over.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from flashduet import __version__
from flashduet.errors import ConfigurationError

TRACE_DIR_VARIABLE = "FLASHDUET_TRACE_DIR"

_propagator = TraceContextTextMapPropagator()
_tracer: trace.Tracer = trace.NoOpTracer()
_provider: TracerProvider | None = None


class JsonFileExporter(SpanExporter):
    """Appends OTLP/JSON, one ExportTraceServiceRequest a line (what collectors read back).

    Ids are hex as OTLP/JSON has it, not protobuf-JSON's base64. A line is one write, so that a
    killed process leaves whole lines.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        batch = MessageToDict(encode_spans(spans))
        for resource in batch.get("resourceSpans", []):
            for scope in resource.get("scopeSpans", []):
                for span in scope.get("spans", []):
                    _hex_ids(span)
        self._file.write(json.dumps(batch) + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def setup(service: str) -> bool:
    """Install the exporters for this process; returns whether anything is recorded.

    Raises:
        ConfigurationError: an exporter was asked for that does not exist.
    """
    global _tracer, _provider
    exporters = _exporters(service)
    if not exporters or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    name = os.environ.get("OTEL_SERVICE_NAME") or f"flashduet-{service}"
    resource = Resource.create(
        {"service.name": name, "service.version": __version__, "flashduet.role": service}
    )
    _provider = TracerProvider(resource=resource)
    for exporter in exporters:
        _provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = _provider.get_tracer("flashduet", __version__)
    return True


def shutdown() -> None:
    """Flush what is recorded, within a bound."""
    if _provider is not None:
        _provider.force_flush(5_000)
        _provider.shutdown()


def tracer() -> trace.Tracer:
    """This process's tracer; records nothing before `setup`."""
    return _tracer


def enabled() -> bool:
    return _provider is not None


def traceparent(context: Context | None) -> str:
    """W3C header of the context's span, for a message's `traceparent`; empty without one."""
    if context is None:
        return ""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context=context)
    return carrier.get("traceparent", "")


def context_of(header: str) -> Context | None:
    """The context that a message's `traceparent` names; None when there is none to follow."""
    if not header or not enabled():
        return None
    return _propagator.extract({"traceparent": header}, context=Context())


def record_span(
    name: str,
    parent: Context | None,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Context | None:
    """Record a phase that is over; `*_ns` are time.time_ns() values.

    Returns the recorded span's context, the parent of its own phases. Nothing is recorded and None
    is returned where the request is not traced (no parent).
    """
    if parent is None or not enabled():
        return None
    span = _tracer.start_span(name, context=parent, start_time=start_ns, attributes=attributes)
    span.end(end_time=end_ns)
    return trace.set_span_in_context(span, Context())


def trace_id(context: Context | None) -> str:
    """Hex trace id of the context's span; empty without one."""
    if context is None:
        return ""
    span_context = trace.get_current_span(context).get_span_context()
    return format(span_context.trace_id, "032x") if span_context.is_valid else ""


def _exporters(service: str) -> list[SpanExporter]:
    exporters: list[SpanExporter] = []
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "")
    has_endpoint = any(
        os.environ.get(name)
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
    if not wanted and has_endpoint:
        wanted = "otlp"
    for name in (part.strip() for part in wanted.split(",")):
        if name == "otlp":
            exporters.append(_otlp_exporter())
        elif name == "console":
            exporters.append(ConsoleSpanExporter())
        elif name not in ("", "none"):
            raise ConfigurationError(
                f"OTEL_TRACES_EXPORTER: {name!r} is not known; use otlp, console or none"
            )
    if folder := os.environ.get(TRACE_DIR_VARIABLE):
        # Process ids repeat from container to container, which may share the folder.
        name = f"{service}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        exporters.append(JsonFileExporter(Path(folder) / name))
    return exporters


def _otlp_exporter() -> SpanExporter:
    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter()
    raise ConfigurationError(
        f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not known; use grpc or http/protobuf"
    )


def _hex_ids(span: dict[str, object]) -> None:
    for key in ("traceId", "spanId", "parentSpanId"):
        if isinstance(value := span.get(key), str):
            span[key] = base64.b64decode(value).hex()
