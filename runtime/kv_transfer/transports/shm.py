"""KV payloads through shared memory: the receiver reads the sender's pool, one copy in all."""

from __future__ import annotations

import select

from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.arrival import Landing
from runtime.kv_transfer.cells import token_pieces
from runtime.kv_transfer.host import host_identity
from runtime.kv_transfer.memory import map_pool
from runtime.kv_transfer.rows import Rows, copy_tokens, pool_rows
from runtime.kv_transfer.runs import Runs
from runtime.kv_transfer.transports.base import Incoming, Outgoing, Transport, Unavailable
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.framing import Connection

_PIECE_BYTES = 8 * 1024 * 1024  # a cancelled request waits for one piece: half a millisecond


class SharedMemory(Transport):
    """Two processes of a host, both with pools in CPU memory."""

    name, pulls, window = "shm", True, 8

    def outgoing(self, connection: Connection) -> Outgoing:
        """Say where the pool can be found."""
        if self.shared is None:
            raise Unavailable("the sender's pool is not in shared memory")
        return HeaderOnly(connection, self.shared.handle)

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """Map the sender's pool."""
        if opening.host != host_identity():
            raise Unavailable("the sender is on another host")
        if self.cache.pool.device.type != "cpu":
            raise Unavailable("the receiver's pool is not in CPU memory")
        part = Part(opening.first_layer, opening.end_layer, opening.first_head, opening.end_head)
        head_bytes = opening.head_dim * self.cache.shape.dtype.itemsize
        try:
            memory = map_pool(handle, 2 * part.cells * opening.slots * head_bytes)
        except (OSError, ValueError) as error:
            raise Unavailable(f"the sender's memory can't be opened: {error}") from error
        return _Incoming(connection, self.cache, opening, Rows(memory, part, opening.slots, head_bytes))


class HeaderOnly(Outgoing):
    """The sender's end of every transport that pulls."""

    def __init__(self, connection: Connection, handle: str) -> None:
        self._connection, self.handle = connection, handle

    def send(self, header: KvSlice, runs: Runs) -> None:
        """Say where the slice is."""
        self._connection.send(header)


class _Incoming(Incoming):
    def __init__(self, connection: Connection, cache: PagedCache, opening: KvOpen, theirs: Rows) -> None:
        self._connection, self._opening = connection, opening
        self._ours, self._theirs = pool_rows(cache), theirs

    def receive(self, header: KvSlice, landing: Landing | None) -> None:
        if landing is None:
            return
        source_runs = checked_runs(header, self._opening)
        for piece in token_pieces(header, _PIECE_BYTES):
            at, end = piece.first_token - header.first_token, piece.end_token - header.first_token
            ours, theirs = self._ours.of(header, piece), self._theirs.of(header, piece)
            runs = landing.runs(piece.first_token, piece.end_token)
            with landing.writing() as is_open:
                if not is_open:
                    return
                copy_tokens(ours, runs, theirs, source_runs.between(at, end))
            require_open(self._connection)


def checked_runs(header: KvSlice, opening: KvOpen) -> Runs:
    """The runs of a header, if all it names lies in the sender's pool.

    Raises
    ------
    ConnectionError : it does not
    """
    try:
        runs = Runs.from_bytes(header.runs)
    except ValueError as error:
        raise ConnectionError(f"the slice has no runs: {error}") from error
    inside = (
        opening.first_layer <= header.first_layer < header.end_layer <= opening.end_layer
        and opening.first_head <= header.first_head < header.end_head <= opening.end_head
        and runs.are_within(opening.slots)
    )
    if not inside or runs.tokens != header.end_token - header.first_token:
        raise ConnectionError("the slice is not in the sender's pool")
    return runs


def require_open(connection: Connection) -> None:
    """A sender that gives its blocks to others before they are taken closes the connection first: what was
    pulled from an open one is what was meant.

    Raises
    ------
    ConnectionError : the sender has closed the connection
    """
    poll = select.poll()
    poll.register(connection.stream, select.POLLRDHUP)
    if poll.poll(0):
        raise ConnectionError("the sender took its blocks back")
