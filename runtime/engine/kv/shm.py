"""KV payloads through shared memory: the receiver reads the sender's pool, one copy in all."""

from __future__ import annotations

import select

from runtime.engine.cache import PagedCache
from runtime.engine.kv.base import Incoming, Outgoing, Transport, Unavailable
from runtime.engine.kv.cells import Piece, Runs, as_words, copy_tokens, pieces, pool_view
from runtime.engine.kv.landing import Landing
from runtime.engine.kv.pool import MappedPool, host_identity
from runtime.messages import KvOpen, KvSlice
from runtime.transport import Connection

_PIECE_BYTES = 8 * 1024 * 1024  # for as long as this takes, a landing's close may have to wait: a millisecond


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
        part_heads, part_layers = (
            opening.end_head - opening.first_head,
            opening.end_layer - opening.first_layer,
        )
        head_bytes = opening.head_dim * self.cache.shape.dtype.itemsize
        try:
            pool = MappedPool(handle, (part_layers, 2, opening.slots, part_heads), head_bytes)
        except (OSError, ValueError) as error:
            raise Unavailable(f"the sender's memory can't be opened: {error}") from error
        return _Incoming(connection, self.cache, opening, pool)


class HeaderOnly(Outgoing):
    """The sender's end of every transport that pulls."""

    def __init__(self, connection: Connection, handle: str) -> None:
        self._connection, self.handle = connection, handle

    def send(self, header: KvSlice, runs: Runs) -> None:
        """Say where the slice is."""
        self._connection.send(header)


class _Incoming(Incoming):
    def __init__(self, connection: Connection, cache: PagedCache, opening: KvOpen, pool: MappedPool) -> None:
        self._connection, self._cache, self._opening, self._pool = connection, cache, opening, pool

    def receive(self, header: KvSlice, landing: Landing | None) -> None:
        if landing is None:
            return
        source_runs = checked_runs(header, self._opening)
        for piece in pieces(header, _PIECE_BYTES):
            source = self._pool.words[source_part(header, piece, self._opening)]
            at, end = piece.first_token - header.first_token, piece.end_token - header.first_token
            with landing.writing() as is_open:
                if not is_open:
                    return
                runs = landing.runs(piece.first_token, piece.end_token)
                view = as_words(pool_view(self._cache, header, piece))
                copy_tokens(view, runs, source, source_runs.between(at, end))
        require_open(self._connection)


def checked_runs(header: KvSlice, opening: KvOpen) -> Runs:
    """The runs of a header, if all it names lies in the sender's pool.

    Raises
    ------
    ConnectionError : it does not
    """
    inside = (
        opening.first_layer <= header.first_layer < header.end_layer <= opening.end_layer
        and opening.first_head <= header.first_head < header.end_head <= opening.end_head
        and all(0 <= first < end <= opening.slots for first, end in header.runs)
    )
    runs = Runs(header.runs)
    if not inside or runs.tokens != header.end_token - header.first_token:
        raise ConnectionError("the slice is not in the sender's pool")
    return runs


def source_part(header: KvSlice, piece: Piece, opening: KvOpen) -> tuple[slice, slice, slice, slice]:
    """A piece's layers, sides, slots (all) and heads in the sender's pool."""
    return (
        slice(piece.first_layer - opening.first_layer, piece.end_layer - opening.first_layer),
        slice(piece.first_side, piece.end_side),
        slice(None),
        slice(header.first_head - opening.first_head, header.end_head - opening.first_head),
    )


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
