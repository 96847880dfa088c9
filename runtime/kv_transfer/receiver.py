"""The receiving side of a KV cache's way: slices go into the blocks of the requests that expect them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from runtime.kv_cache.pages import Pages
from runtime.kv_transfer.arrival import Landing
from runtime.kv_transfer.cells import LIMIT_BYTES, slice_bytes
from runtime.kv_transfer.transports.base import DEADLINE_S, Incoming, Unavailable, is_readable, next_message
from runtime.kv_transfer.transports.registry import make_transport
from runtime.protocol.between_workers import KvLanded, KvOpen, KvOpened, KvSlice, KvTaken
from runtime.protocol.framing import Connection

log = logging.getLogger(__name__)

_ANSWER_EVERY = 4
"""Slices answered at once at most, while more of them wait: an answer costs as much as a small slice."""


class KvReceiver:
    """Receives KV caches for the requests that this worker expects.

    Blocks are promised (Reserved) only when every worker of the replica expects the request. So a slice of a
    request that nobody expects belongs to one that was cancelled: its bytes are dropped.

    Parameters
    ----------
    on_landed : called once per request, when all that this worker holds of it is here; from any thread
    on_failed : called with a request id and a reason when a connection breaks that brought a part of it
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
        self._landings: dict[str, Landing] = {}

    def expect(self, request_id: str, table: Sequence[int], first_token: int, end_token: int) -> None:
        """Tokens [first, end) of a request will arrive, for the blocks of its table."""
        landing = Landing(self._cache, request_id, table, first_token, end_token)
        if first_token == end_token:
            self._report(landing)
        else:
            self._landings[request_id] = landing

    def silent_s(self, request_id: str) -> float:
        """Seconds since the last slice of a request that still arrives; infinite if none has come."""
        landing = self._landings.get(request_id)
        return time.monotonic() - landing.last_s if landing and landing.last_s else math.inf

    def forget(self, request_id: str) -> None:
        """Drop what arrives of a request; once this returns, nothing is written to its blocks any more."""
        if landing := self._landings.pop(request_id, None):
            landing.close()

    def serve(self, connection: Connection, peer: str) -> None:
        """Receive slices until the peer closes; requests that were not complete by then fail."""
        carried = set[Landing]()
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
        for landing in carried:
            if self._landings.get(landing.request_id) is landing:
                self.forget(landing.request_id)
                self._on_failed(landing.request_id, f"the KV cache from {peer} broke off: {text}")

    def _open(self, connection: Connection) -> Incoming:
        """Agree on a transport."""
        opening = connection.receive()
        if not isinstance(opening, KvOpen):
            raise ConnectionError(f"a {type(opening).__name__} does not open a KV connection")
        shape, problems = self._cache.shape, list[str]()
        if (opening.head_dim, opening.dtype) != (shape.head_dim, shape.dtype_name):
            problems.append(
                f"heads are {opening.head_dim} x {opening.dtype}, not {shape.head_dim} x {shape.dtype_name}"
            )
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
        problem = "; ".join(problems) or "none that is known"
        connection.send(KvOpened(transport="", problem=problem))
        raise ConnectionError(f"no transport in common: {problem}")

    def _receive(self, incoming: Incoming, header: KvSlice, carried: set[Landing]) -> None:
        if header.payload_bytes > LIMIT_BYTES:
            raise ConnectionError(f"a slice of {header.payload_bytes} bytes")
        landing = self._landings.get(header.request_id)
        if landing is not None:
            if problem := landing.claim(header):
                raise ConnectionError(problem)
            carried.add(landing)
        elif not 0 < header.payload_bytes == slice_bytes(header, self._cache.shape.bytes_per_token_cell):
            raise ConnectionError(f"a slice of {header.payload_bytes} bytes, which are not its cells")
        incoming.receive(header, landing)
        if landing is not None and landing.arrived(header):
            carried.discard(landing)
            if self._landings.pop(header.request_id, None) is landing:
                self._report(landing)

    def _report(self, landing: Landing) -> None:
        self._on_landed(
            KvLanded(
                request_id=landing.request_id,
                worker=self._worker,
                bytes_received=landing.bytes_received,
                seconds=landing.last_s - landing.first_s,
            )
        )
