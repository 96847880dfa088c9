"""Traces as a collector receives them, for requests to a coordinator with scripted drivers."""

import gzip
import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from scripted import PAIR, PROMPT, run, sampling, serving, settle, tokens_of

from cost_model.errors import InputError
from runtime.api.metrics import Metrics
from runtime.frontend.request import Origin
from runtime.frontend.traces import Tracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector():
    """The URL of an OTLP receiver, and the spans that it has received."""
    spans = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            got = ExportTraceServiceRequest.FromString(body)
            spans.extend(
                (self.path, span)
                for resource in got.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_request_is_a_span_with_its_phases_in_the_clients_trace(collector):
    url, spans = collector
    tracer = Tracer(url, Metrics())

    async def scenario():
        async with serving(PAIR, observer=tracer) as (coordinator, _):
            origin = Origin("ali", "mine", traceparent=f"00-{TRACE}-{PARENT}-01")
            assert len(await tokens_of(coordinator.submit(PROMPT, sampling(4), origin=origin))) == 4
            await settle(coordinator)

    run(scenario)
    tracer.stop()
    assert {path for path, _ in spans} == {"/v1/traces"}
    by_name = {span.name: span for _, span in spans}
    assert set(by_name) == {"request", "queue", "prefill", "kv transfer", "decode"}
    whole = by_name.pop("request")
    assert whole.trace_id.hex() == TRACE and whole.parent_span_id.hex() == PARENT
    attributes = {each.key: each.value for each in whole.attributes}
    assert attributes["hexgen2.request_id"].string_value == "mine"
    assert attributes["hexgen2.outcome"].string_value == "length"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    for phase in by_name.values():
        assert phase.trace_id == whole.trace_id and phase.parent_span_id == whole.span_id
        assert phase.start_time_unix_nano <= phase.end_time_unix_nano <= whole.end_time_unix_nano
    order = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert order[0].start_time_unix_nano == whole.start_time_unix_nano
    for before, after in itertools.pairwise(order):
        assert before.end_time_unix_nano == after.start_time_unix_nano


def test_a_request_that_never_started_has_a_queue_and_no_parent(collector):
    url, spans = collector
    tracer = Tracer(f"{url}/v1/traces", Metrics())

    async def scenario():
        async with serving(PAIR, budget=7, observer=tracer) as (coordinator, drivers):
            for driver in drivers.values():
                driver.gate.clear()
            coordinator.submit(PROMPT, sampling())
            coordinator.cancel(coordinator.submit(PROMPT, sampling(), origin=Origin(traceparent="nonsense")))

    run(scenario)
    tracer.stop()
    cancelled = [
        span
        for _, span in spans
        for each in span.attributes
        if (each.key, each.value.string_value) == ("hexgen2.outcome", "cancelled")
    ]
    (root,) = cancelled
    assert root.parent_span_id == b""
    assert [span.name for _, span in spans if span.parent_span_id == root.span_id] == ["queue"]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://here", "http://", ""])
def test_what_is_no_collector_is_refused(endpoint):
    with pytest.raises(InputError) as caught:
        Tracer(endpoint, Metrics())
    assert "--otlp-endpoint" in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InputError) as caught:
        Tracer("http://localhost:4318", Metrics())
    assert "pip install 'hexgen2[otel]'" in str(caught.value)


def test_a_collector_that_is_not_there_holds_nothing_up():
    tracer = Tracer("http://127.0.0.1:9", Metrics())

    async def scenario():
        async with serving(PAIR, observer=tracer) as (coordinator, _):
            assert len(await tokens_of(coordinator.submit(PROMPT, sampling(4)))) == 4

    run(scenario)
