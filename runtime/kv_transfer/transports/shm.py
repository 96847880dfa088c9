"""KV payloads through shared memory: the receiver copies from the sender's pool into its own, once."""

from __future__ import annotations

from runtime import native
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.arrival import KvArrival
from runtime.kv_transfer.memory import map_pool
from runtime.kv_transfer.slices import count_tokens, token_pieces
from runtime.kv_transfer.staging import Rows, copy_tokens, pool_rows
from runtime.kv_transfer.transports.base import (
    HeaderOnly,
    Incoming,
    Outgoing,
    Transport,
    Unavailable,
    checked_runs,
    host_identity,
    require_open,
)
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.framing import Connection

_PIECE_BYTES = 8 * 1024 * 1024  # cancelling a request waits for one piece: half a millisecond


class SharedMemory(Transport):
    """Between two processes of a host, both with pools in CPU memory."""

    name, pulls, window = "shm", True, 8

    def outgoing(self, connection: Connection) -> Outgoing:
        """Tell the receiver where the pool is."""
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
        head_bytes = self.cache.shape.head_bytes
        try:
            memory = map_pool(handle, opening.sides * part.cells * opening.slots * head_bytes)
        except (OSError, ValueError) as error:
            raise Unavailable(f"the sender's memory can't be opened: {error}") from error
        theirs = Rows(memory, part, opening.sides, opening.slots, head_bytes)
        return _Incoming(connection, self.cache, opening, theirs)


class _Incoming(Incoming):
    def __init__(self, connection: Connection, cache: PagedCache, opening: KvOpen, theirs: Rows) -> None:
        self._connection, self._opening = connection, opening
        self._ours, self._theirs = pool_rows(cache), theirs
        self._count = native.count_tokens if native.copies() else count_tokens

    def receive(self, header: KvSlice, arrival: KvArrival | None) -> None:
        if arrival is None:
            return
        source_runs = checked_runs(header, self._opening, self._count)
        for piece in token_pieces(header, self._opening.sides, _PIECE_BYTES):
            at, end = piece.first_token - header.first_token, piece.end_token - header.first_token
            ours, theirs = self._ours.of(header, piece), self._theirs.of(header, piece)
            runs = arrival.runs(piece.first_token, piece.end_token)
            with arrival.writing() as is_open:
                if not is_open:
                    return
                copy_tokens(ours, runs, theirs, source_runs.between(at, end))
            require_open(self._connection)
