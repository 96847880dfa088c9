"""OpenTelemetry traces: when a request ends, a span with its phases is made from its record."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from cost_model.errors import InputError
from runtime.frontend.request import Observer, RequestRecord

TRACES_PATH = "/v1/traces"
FLUSH_MS = 3000


class Tracer:
    """An observer that exports a request's spans when it ends, and notifies the next observer.

    Parameters
    ----------
    endpoint : URL of an OTLP/HTTP collector; the path defaults to /v1/traces
    following : the next observer

    Raises
    ------
    InputError : the endpoint is not a URL, or OpenTelemetry is not installed
    """

    def __init__(self, endpoint: str, following: Observer) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            remedy = "give the URL of a collector, such as http://localhost:4318"
            raise InputError("--otlp-endpoint", endpoint, "is not an http URL", remedy)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            remedy = "pip install 'hexgen2[otel]'"
            raise InputError("--otlp-endpoint", "", f"needs {error.name}", remedy) from error
        if url.path in ("", "/"):
            endpoint = url._replace(path=TRACES_PATH).geturl()
        self._following, self._inside = following, set_span_in_context
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "hexgen2"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("hexgen2")
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def token_gap(self, seconds: float) -> None:
        self._following.token_gap(seconds)

    def ended(self, record: RequestRecord) -> None:
        self._following.ended(record)
        parent = self._propagator.extract({"traceparent": record.traceparent})
        span = self._tracer.start_span(
            "request", parent, attributes=_attributes(record), start_time=self._ns(record.arrived_s)
        )
        for name, begin_s, end_s in _phases(record):
            phase = self._tracer.start_span(name, self._inside(span), start_time=self._ns(begin_s))
            phase.end(self._ns(end_s))
        span.end(self._ns(record.ended_s))

    def stop(self) -> None:
        """Export the remaining spans, for at most FLUSH_MS."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + int(monotonic_s * 1e9)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    return {
        "hexgen2.request_id": record.client_request_id,
        "hexgen2.client": record.client,
        "hexgen2.outcome": record.outcome,
        "hexgen2.prefill_replica": record.prefill_replica,
        "hexgen2.decode_replica": record.decode_replica,
        **({"hexgen2.path": record.path} if record.path else {}),
        "hexgen2.resumes": record.resumes,
        "hexgen2.kv_bytes": record.kv_bytes,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
    }


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Name, begin and end of each phase that began; one that a failure cut short ends with the request."""
    phases = [("queue", record.arrived_s, record.routed_s or record.ended_s)]
    if record.routed_s:
        phases.append(("prefill", record.routed_s, record.first_token_s or record.ended_s))
    if record.kv_bytes:
        phases.append(("kv transfer", record.kv_arrived_s - record.kv_s, record.kv_arrived_s))
    if record.first_token_s:
        phases.append(("decode", record.first_token_s, record.last_token_s))
    return phases
