"""The client of `hexgen2 bench` against small servers of other kinds, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from commands import hexgen2, refused

from cost_model.errors import InputError
from hexgen2.bench.http import Address, HttpError, Server
from hexgen2.bench.run import Load, bench
from hexgen2.workload.requests import Requests

WAIT_S, GAP_S = 0.03, 0.01


class Script(BaseHTTPRequestHandler):
    """An OpenAI server whose behaviour is set by class attributes."""

    protocol_version = "HTTP/1.1"
    takes: frozenset[str] = frozenset({"token_ids", "ignore_eos"})
    ending = "whole"
    usage = True
    bodies: list[dict]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "one"}, {"id": "two"}]})
        else:
            self._json(404, {"detail": "not here"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if isinstance(body["prompt"], list) and "token_ids" not in self.takes:
            return self._json(422, {"error": {"message": "prompt must be text"}})
        if "ignore_eos" in body and "ignore_eos" not in self.takes:
            return self._json(400, {"error": {"message": "unknown parameter ignore_eos"}})
        trial = not self.bodies
        self.bodies.append(body)
        if self.ending == "busy" and not trial:
            return self._json(503, {"error": {"message": "too many\nrequests"}})
        self._stream(body, "whole" if trial else self.ending)

    def _json(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict, ending: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pause = threading.Event()
        pause.wait(WAIT_S)
        count = body["max_tokens"]
        for number in range(count):
            last = number + 1 == count
            if last and ending == "cut":
                self.close_connection = True
                return
            if last and ending == "strange":
                self._event({"choices": ["text"]})
                break
            if last and ending == "error":
                self._event({"error": {"message": "a worker is gone"}})
                break
            choice = {"index": 0, "text": "x", "finish_reason": "length" if last else None}
            self._event({"choices": [choice], "usage": None})
            if not last:
                pause.wait(GAP_S)
        if self.usage:
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class Quiet(ThreadingHTTPServer):
    """Logs nothing when clients hang up."""

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def serving(**behaviour: object) -> Iterator[tuple[str, list[dict]]]:
    """The URL of such a server, and the request bodies that it received."""
    bodies: list[dict] = []
    handler = type("Handler", (Script,), {**behaviour, "bodies": bodies})
    with Quiet(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        finally:
            server.shutdown()


def requests(count: int, isl: int = 9, osl: int = 6) -> Requests:
    return Requests(np.arange(count) * 0.002, np.full(count, isl), np.full(count, osl), "by hand")


def test_latencies_include_what_the_server_waited():
    with serving(usage=False) as (url, bodies):
        found = bench(Load(url), requests(8), {"ttft": WAIT_S * 500, "tpot": 1e9})
    assert found.completed == 8 and found.model == "one"
    assert found.mean_ttft_ms >= WAIT_S * 1e3
    assert found.mean_e2el_ms >= (WAIT_S + 5 * GAP_S) * 1e3
    assert found.mean_tpot_ms == pytest.approx((found.mean_e2el_ms - found.mean_ttft_ms) / 5)
    assert found.total_output_tokens == 48 and found.total_input_tokens == 72
    assert found.request_goodput == 0.0
    assert found.replicas == {} and found.routes == []
    sent = bodies[1:]
    assert all(len(body["prompt"]) == 9 and body["max_tokens"] == 6 for body in sent)
    assert len({tuple(body["prompt"]) for body in sent}) == 8


def test_tokens_are_counted_by_the_server_where_it_does():
    with serving() as (url, _):
        found = bench(Load(url), requests(3), {})
    assert found.total_output_tokens == 15 and found.total_input_tokens == 21


@pytest.mark.parametrize("takes", [{"ignore_eos"}, {"token_ids"}, set()])
def test_servers_that_take_less_are_asked_for_less(takes):
    with serving(takes=frozenset(takes)) as (url, bodies):
        found = bench(Load(url, model="two"), requests(3), {})
    assert found.completed == 3 and found.failures == {}
    assert all(("ignore_eos" in body) == ("ignore_eos" in takes) for body in bodies)
    assert all(isinstance(body["prompt"], list) == ("token_ids" in takes) for body in bodies)
    assert all(body["model"] == "two" for body in bodies)
    said = " ".join(found.assumptions)
    assert ("words" in said) == ("token_ids" not in takes)
    assert ("may be shorter" in said) == ("ignore_eos" not in takes)


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("busy", "503: too many requests"),
        ("error", "a worker is gone"),
        ("strange", "a stream event does not follow the OpenAI API"),
        ("cut", "the connection was closed before the answer was complete"),
    ],
)
def test_failed_requests_are_counted_with_their_reason(ending, why):
    with serving(ending=ending) as (url, _):
        found = bench(Load(url), requests(4), {})
    assert (found.completed, found.failed, found.failures) == (0, 4, {why: 4})
    assert found.request_throughput == 0.0


def test_inputs_that_cannot_be_used_are_one_line():
    options = ("--isl", "4", "--osl", "4")
    assert "connection refused" in refused(hexgen2("bench", "http://127.0.0.1:1", *options))
    assert "URL" in refused(hexgen2("bench", "ftp://127.0.0.1", *options))
    timeless = hexgen2("bench", "http://127.0.0.1:1", *options, "--duration-s", "3")
    assert "--duration-s" in refused(timeless)
    with serving() as (url, _):
        assert "--model" in refused(hexgen2("bench", url, *options, "--model", "three"))
        with pytest.raises(InputError, match="names no model"):
            bench(Load(f"{url}/elsewhere"), requests(1), {})


def raw(handle: Callable) -> bytes:
    """What the client reads from two GETs to a server that writes these bytes."""

    async def ask() -> bytes:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            client = Server(Address.parse(f"127.0.0.1:{port}"))
            lines = []
            for _ in range(2):
                response = await client.get("/")
                lines.append([line async for line in response.lines()])
            assert lines[0] == lines[1]
            return b"\n".join(lines[0])

    return asyncio.run(asyncio.wait_for(ask(), 30))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("keeps", [True, False])
def test_chunks_may_end_anywhere(seed, keeps):
    rng = random.Random(seed)
    text = b"\n".join(rng.randbytes(rng.randrange(40)).replace(b"\n", b"") for _ in range(20)) + b"end"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            closing = b"" if keeps else b"Connection: close\r\n"
            answer = b"HTTP/1.1 200 OK\r\n%bTransfer-Encoding: chunked\r\n\r\n" % closing
            rest = text
            while rest:
                size = rng.randrange(1, 30)
                answer += b"%X;x=y\r\n%b\r\n" % (len(rest[:size]), rest[:size])
                rest = rest[size:]
            answer += b"0\r\nTrailer: yes\r\n\r\n"
            while answer:
                size = rng.randrange(1, 50)
                writer.write(answer[:size])
                await writer.drain()
                await asyncio.sleep(0)
                answer = answer[size:]
            if not keeps:
                writer.close()
                return

    assert raw(handle) == text


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnothex\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"x" * (1 << 21),
    ],
)
def test_whatever_is_not_an_answer_is_an_error(answer):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    with pytest.raises(HttpError):
        raw(handle)


def test_addresses():
    for url, host, port, tls, path in [
        ("http://a:81/v1/", "a", 81, False, ""),
        ("https://b.example/openai/v1", "b.example", 443, True, "/openai"),
        ("localhost:8000", "localhost", 8000, False, ""),
        ("http://[::1]:9", "::1", 9, False, ""),
    ]:
        address = Address.parse(url)
        assert (address.host, address.port, address.tls, address.path) == (host, port, tls, path)
    for wrong in ("", "http://", "http://a:99999", "http://a b", "file:///etc/passwd"):
        with pytest.raises(InputError):
            Address.parse(wrong)
