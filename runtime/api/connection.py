"""One HTTP connection, with limits on clients that are slow, send too much, or open too many connections.

This is the only file that relies on uvicorn's internals (how `HttpToolsProtocol` keeps its parser, pipeline
and request cycle, `_unset_keepalive_if_required`, `STATUS_LINE`). It was tested with uvicorn 0.54 and
httptools 0.9; with other versions, run tests/runtime/api/test_api_hostile.py and test_front_limits.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from runtime.api.errors import ApiError
from runtime.options import FrontOptions

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024
"""Most bytes before the body of a request."""
OFFERS = frozenset({b"upgrade", b"connection", b"http2-settings"})
PROBE_S, LONGEST_PROBE_S = 0.1, 1.0
READ_BYTES = 64 * 1024
"""Most bytes to read from one connection before the others get their turn."""
MAX_HEADERS = 100
MAX_HEADER_LINES = 2 * MAX_HEADERS
"""Headers and trailers together."""
MAX_PIPELINED = 128
MAX_ADDRESS = 64
MAX_PIECES, MIN_PIECE_BYTES = 1000, 64
BAD = "invalid_request_error"
LINGER_S = 5.0
"""How long to keep reading a refused request, so that its sender gets to see the refusal."""


class _Gathered:
    """A transport that joins everything written in one iteration of the event loop into one write: the head,
    body and end of an answer, or the events of a stream."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._unsent: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._unsent and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's httptools connection, with limits; it refuses clients in OpenAI's error format.

    503 beyond `max_connections`, 429 for too many connections from one address, 408 for headers that do not
    arrive within `read_timeout_s`, 431 for too many bytes of headers, 405 for CONNECT, 400 for input that is
    not HTTP. A connection whose client reads nothing for `write_timeout_s` is aborted. Offers to upgrade the
    protocol (such as h2c by Java's client) are ignored. A client that closed only its sending side still
    gets its answer.
    """

    options: FrontOptions
    by_address: Counter[str]
    """Open connections by address."""
    _address = ""
    _half_closed = False
    _why: ApiError | None = None
    _pieces = _body_bytes = 0
    """Chunks and bytes of the current body so far."""
    _probing: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _refused = False
    _in_head = True
    _heads = _head_bytes = 0
    """Request heads received, and bytes received of the next one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _Gathered(transport, self.loop)))
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._address = site_of(self.client[0] if self.client else "")
        self.by_address[self._address] += 1
        most, own_most = self.options.max_connections, most_of_one_address(self.options)
        if len(self.connections) > 2 * most:
            transport.abort()
        elif len(self.connections) > most:
            full = f"there are already {most} connections (--max-connections)"
            self._refuse(ApiError(503, full, "service_unavailable", None, "overloaded", 1))
        elif self.by_address[self._address] > own_most:
            full = f"there are already {own_most} connections from this address (--max-address-connections)"
            self._refuse(ApiError(429, full, "rate_limit_error", None, "too_many_connections", 1))
        else:
            self._within(self.options.read_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        before = self._in_head and self._heads
        self._feed(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head and before == self._heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._too_long()
                return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._in_head and self._timer is None:
            self._within(self.options.read_timeout_s, self._too_slow)

    def _feed(self, data: bytes) -> None:
        """Feed the parser. It stops at an offer to upgrade the protocol; then a new parser gets the same head
        without the offer."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError as fault:
                self._refuse(self._why or ApiError(400, f"this is not an HTTP request: {fault}", BAD))
                return
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(ApiError(405, "this server is not a proxy: CONNECT", BAD))
                    return
                head = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
                kept = (header for header in self.headers if header[0] not in OFFERS)
                lines = b"".join(b"%b: %b\r\n" % header for header in kept)
                data = b"%b%b\r\n%b" % (head, lines, data[offer.args[0] :])
                self.parser = httptools.HttpRequestParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADER_LINES:
            raise self._stop(ApiError(431, f"there are more than {MAX_HEADERS} headers", BAD))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_offer:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._stop(
                ApiError(400, f"more than {MAX_PIPELINED} requests are waiting on this connection", BAD)
            )
        super().on_headers_complete()
        self._in_head, self._head_bytes = False, 0
        self._heads += 1
        self._pieces = self._body_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Refuse bodies of tiny chunks: each chunk costs a call, however small it is."""
        self._pieces, self._body_bytes = self._pieces + 1, self._body_bytes + len(body)
        if self._pieces > MAX_PIECES and self._body_bytes < self._pieces * MIN_PIECE_BYTES:
            tiny = (
                f"the body has more than {MAX_PIECES} chunks of fewer than {MIN_PIECE_BYTES} bytes on average"
            )
            raise self._stop(ApiError(400, tiny, BAD))
        super().on_body(body)

    def _stop(self, refusal: ApiError) -> ApiError:
        """Make the parser stop at once, so that the input is refused: as each line or chunk costs a call,
        parsing thousands of them would hold up all other clients."""
        self._why = refusal
        return refusal

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        super().on_message_complete()
        self._in_head = True

    @property
    def _is_offer(self) -> bool:
        return self.parser.should_upgrade()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send nothing more, but may still read the answer to what it sent."""
        if not self._refused and (self._head_bytes or not self._in_head):
            self._refuse(ApiError(400, "the connection closed before the request was complete", BAD))
        elif self._refused or self.cycle is None or self.cycle.response_complete:
            self.transport.close()  # after writing what is still pending
        elif not self._half_closed:
            self._half_closed = True
            self._probe(PROBE_S)
        return True

    def _probe(self, again_s: float) -> None:
        """Find out whether the client closed only its sending side or is gone: only a failing write tells.
        Until there is an answer to send, write interim responses."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        waits = not (cycle.response_started or self.pipeline)  # no answer is being sent
        if waits and self.scope["http_version"] != "1.0":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probing = self.loop.call_later(again_s, self._probe, LONGEST_PROBE_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete and not self.pipeline:
            self.transport.close()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._within(LINGER_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.options.write_timeout_s, self._reads_nothing)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._probing is not None:
            self._probing.cancel()
        self.by_address[self._address] -= 1
        if self.by_address[self._address] <= 0:
            del self.by_address[self._address]
        self.resume_writing()
        super().connection_lost(exc)

    def _too_long(self) -> None:
        most = f"there are more than {MAX_HEAD_BYTES} bytes of headers"
        self._refuse(ApiError(431, most, BAD))

    def _too_slow(self) -> None:
        late = f"the headers took longer than {self.options.read_timeout_s:g} s"
        self._refuse(ApiError(408, late, BAD))

    def _reads_nothing(self) -> None:
        log.info("closed a connection whose client read nothing for %g s", self.options.write_timeout_s)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Send an error without a request, keep reading for a moment so that the error arrives, and close."""
        self._refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:
                self.transport.abort()
                return
        body = json.dumps(error.body()).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        if error.retry_after_s is not None:
            head += b"retry-after: %d\r\n" % error.retry_after_s
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.write_eof()
        self._within(LINGER_S, self.transport.abort)

    def _within(self, limit_s: float, otherwise: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(limit_s, otherwise)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited_by(options: FrontOptions) -> type[HttpConnection]:
    """A connection class with these limits, for uvicorn."""
    return type("HttpConnection", (HttpConnection,), {"options": options, "by_address": Counter()})


def most_of_one_address(options: FrontOptions) -> int:
    """Connections that one address may have; by default nine tenths of all."""
    most = options.max_address_connections
    return options.max_connections - options.max_connections // 10 if most is None else most


def site_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 network of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:MAX_ADDRESS]
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return f"{ipaddress.IPv6Network((found, 64), strict=False)}"
    return str(getattr(found, "ipv4_mapped", None) or found)
