"""The receiving side of KV transfers: writes slices to the blocks of the requests that expect them."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from runtime.kv_cache.pages import Pages
from runtime.kv_transfer.arrival import KvArrival
from runtime.kv_transfer.slices import LIMIT_BYTES, slice_bytes
from runtime.kv_transfer.transports.base import DEADLINE_S, Incoming, Unavailable, is_readable, next_message
from runtime.kv_transfer.transports.registry import make_transport
from runtime.protocol.between_workers import KvLanded, KvOpen, KvOpened, KvSlice, KvTaken
from runtime.protocol.framing import Connection

log = logging.getLogger(__name__)

_ANSWER_EVERY = 4
"""While more slices wait, up to this many are confirmed at once: an answer costs as much as a small slice."""


class KvReceiver:
    """Receives KV caches for the requests that this worker expects.

    The driver promises blocks (`Reserved`) only when every worker of the replica expects the request. So a
    slice of an unknown request belongs to one that was cancelled, and its bytes are dropped.

    Parameters
    ----------
    on_landed : called once per request, when this worker's part of it is complete; from any thread
    on_failed : called with a request id and a reason when a connection breaks that carried a part of it
    deadline_s : how long a sender may be silent within a slice
    """

    def __init__(
        self,
        worker: str,
        cache: Pages,
        on_landed: Callable[[KvLanded], None],
        on_failed: Callable[[str, str], None],
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._worker, self._cache, self._deadline_s = worker, cache, deadline_s
        self._on_landed, self._on_failed = on_landed, on_failed
        self._arrivals: dict[str, KvArrival] = {}
        self._connections = set[Connection]()
        self._closed = False
        self._changed = threading.Condition()

    def expect(self, request_id: str, table: Sequence[int], first_token: int, end_token: int) -> None:
        """Announce that tokens [first, end) of a request will arrive, for the blocks of its table."""
        arrival = KvArrival(self._cache, request_id, table, first_token, end_token)
        if first_token == end_token or not self._cache.shape.part.cells:
            self._report(arrival)
        else:
            self._arrivals[request_id] = arrival

    def silent_s(self, request_id: str) -> float:
        """Seconds since the last slice of a request that is still arriving; infinite if there was none."""
        arrival = self._arrivals.get(request_id)
        return time.monotonic() - arrival.last_s if arrival and arrival.last_s else math.inf

    def forget(self, request_id: str) -> None:
        """Drop the rest of a request; after this returns, nothing is written to its blocks."""
        if arrival := self._arrivals.pop(request_id, None):
            arrival.close()

    def close(self) -> None:
        """End all connections and wait until nothing is written any more; later ones are refused."""
        with self._changed:
            self._closed = True
            for connection in self._connections:
                with suppress(OSError):
                    connection.stream.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._connections, self._deadline_s)

    def serve(self, connection: Connection, peer: str) -> None:
        """Receive slices until the peer closes the connection; incomplete requests fail then."""
        with self._changed:
            if self._closed:
                connection.close()
                return
            self._connections.add(connection)
        try:
            self._serve(connection, peer)
        finally:
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()

    def _serve(self, connection: Connection, peer: str) -> None:
        carried = set[KvArrival]()
        incoming: Incoming | None = None
        text = "the sender closed the connection"
        try:
            connection.set_deadline(self._deadline_s)
            incoming = self._open(connection)
            taken = 0
            while (message := next_message(connection)) is not None:
                if not isinstance(message, KvSlice):
                    raise ConnectionError(f"a {type(message).__name__} is not for a KV connection")
                self._receive(incoming, message, carried)
                taken += 1
                if taken == _ANSWER_EVERY or not carried or not is_readable(connection):
                    connection.send(KvTaken(slices=taken))
                    taken = 0
        except (OSError, RuntimeError, ValueError) as error:
            text = str(error) or type(error).__name__
            log.warning("worker %s: KV from %s broke off: %s", self._worker, peer, text)
        finally:
            connection.close()
            if incoming is not None:
                incoming.close()
        for arrival in carried:
            if self._arrivals.get(arrival.request_id) is arrival:
                self.forget(arrival.request_id)
                self._on_failed(arrival.request_id, f"the KV cache from {peer} broke off: {text}")

    def _open(self, connection: Connection) -> Incoming:
        """Accept the first offered transport that works."""
        opening = connection.receive()
        if not isinstance(opening, KvOpen):
            raise ConnectionError(f"a {type(opening).__name__} does not open a KV connection")
        shape, problems = self._cache.shape, list[str]()
        theirs = f"{opening.sides} x {opening.head_dim} x {opening.dtype}"
        if theirs != (ours := f"{shape.sides} x {shape.head_dim} x {shape.dtype_name}"):
            problems.append(f"heads are {theirs}, not {ours}")
        for offer in () if problems else opening.offers:
            transport = make_transport(offer.transport, self._cache, self._deadline_s, None)
            if transport is None:
                continue
            try:
                incoming = transport.incoming(connection, opening, offer.handle)
            except Unavailable as error:
                problems.append(f"{offer.transport}: {error}")
                continue
            connection.send(KvOpened(transport=offer.transport))
            return incoming
        problem = "; ".join(problems) or "none of the offered transports is known"
        connection.send(KvOpened(transport="", problem=problem))
        raise ConnectionError(f"no transport in common: {problem}")

    def _receive(self, incoming: Incoming, header: KvSlice, carried: set[KvArrival]) -> None:
        if header.payload_bytes > LIMIT_BYTES:
            raise ConnectionError(f"a slice of {header.payload_bytes} bytes")
        arrival = self._arrivals.get(header.request_id)
        if arrival is not None:
            if problem := arrival.claim(header):
                raise ConnectionError(problem)
            carried.add(arrival)
        elif not 0 < header.payload_bytes == slice_bytes(header, self._cache.shape.bytes_per_token_cell):
            raise ConnectionError(f"a slice of {header.payload_bytes} bytes, which does not match its cells")
        incoming.receive(header, arrival)
        if arrival is not None and arrival.arrived(header):
            carried.discard(arrival)
            if self._arrivals.pop(header.request_id, None) is arrival:
                self._report(arrival)

    def _report(self, arrival: KvArrival) -> None:
        self._on_landed(
            KvLanded(
                request_id=arrival.request_id,
                worker=self._worker,
                bytes_received=arrival.bytes_received,
                seconds=arrival.last_s - arrival.first_s,
            )
        )
