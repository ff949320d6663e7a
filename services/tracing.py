"""OpenTelemetry spans that follow a group from lease to gradient: W3C context in message headers, spans to OTLP or
to a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind


class _FileExporter(SpanExporter):
    """Finished spans as JSON lines, for runs without a collector."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def export(self, spans: object) -> SpanExportResult:
        for span in spans:  # type: ignore[attr-defined]
            assert isinstance(span, ReadableSpan)
            self._file.write((span.to_json(indent=None) or "") + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def start_tracing(service: str, instance: str, *, otlp_endpoint: str, file: Path | None) -> TracerProvider | None:
    """Install a provider when a destination is configured; otherwise spans cost next to nothing and only carry context."""
    if not otlp_endpoint and file is None:
        return None
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"headrace.{service}", "service.instance.id": instance})
    )
    if file is not None:
        provider.add_span_processor(BatchSpanProcessor(_FileExporter(file)))
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint)))
    trace.set_tracer_provider(provider)
    return provider


def inject(headers: dict[str, str]) -> dict[str, str]:
    """Add the current span's context to message headers."""
    propagate.inject(headers)
    return headers


@contextmanager
def span(name: str, headers: Mapping[str, str] | None = None, **attributes: str | int | float | bool) -> Iterator[Span]:
    """A span for one piece of work; `headers` of the message that caused it make it the parent."""
    context = propagate.extract(dict(headers)) if headers else None
    with trace.get_tracer("headrace").start_as_current_span(
        name, context=context, kind=SpanKind.CONSUMER if headers else SpanKind.INTERNAL, attributes=dict(attributes)
    ) as current:
        yield current
