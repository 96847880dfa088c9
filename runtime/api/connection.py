"""One HTTP connection of the server, with limits on clients that are slow, large or many."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from runtime.api.errors import ApiError
from runtime.options import FrontOptions

log = logging.getLogger(__name__)

LINGER_S = 5.0
"""How long the rest of what was refused is read, so that its sender sees the refusal."""


class _Gathered:
    """A transport of which all that is written in one round of the event loop leaves in one write: the head,
    the body and the end of an answer, or what a stream has to say."""

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


class Connection(H11Protocol):
    """uvicorn's connection over h11, but that answers in OpenAI's form what is no request:

    503 where there are `max_connections` already, 408 for headers that are not here within `read_timeout_s`,
    431 for too many bytes of them, 400 for what is not HTTP. One whose client reads nothing for
    `write_timeout_s` is cut.
    """

    options: FrontOptions
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _Gathered(transport, self.loop)))
        most = self.options.max_connections
        if len(self.connections) > 2 * most:
            transport.abort()
        elif len(self.connections) > most:
            full = f"there are {most} connections already"
            self._refuse(ApiError(503, full, "service_unavailable", None, "overloaded", 1))
        else:
            self._within(self.options.read_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            if self.conn.our_state is not h11.DONE:
                self._stop_timer()
        elif self._timer is None:
            self._within(self.options.read_timeout_s, self._too_slow)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
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
        self.resume_writing()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        fault = sys.exception()
        status = getattr(fault, "error_status_hint", 400)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse(ApiError(status, f"this is no HTTP request: {fault or msg}", "invalid_request_error"))

    def _too_slow(self) -> None:
        late = f"the headers took longer than {self.options.read_timeout_s:g} s"
        self._refuse(ApiError(408, late, "invalid_request_error"))

    def _reads_nothing(self) -> None:
        log.info("a client read nothing for %g s and was cut", self.options.write_timeout_s)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer where there is no request, read on for a moment so that the answer arrives, and close."""
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(error.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        headers += [("connection", "close")]
        if error.retry_after_s is not None:
            headers += [("retry-after", str(error.retry_after_s))]
        head = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self._within(LINGER_S, self.transport.abort)

    def _within(self, limit_s: float, otherwise: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(limit_s, otherwise)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited_by(options: FrontOptions) -> type[Connection]:
    """The class of connections with these limits."""
    return type("Connection", (Connection,), {"options": options})
