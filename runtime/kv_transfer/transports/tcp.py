"""KV payloads on the control connection itself, behind their headers: works between any two hosts."""

from __future__ import annotations

from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.arrival import KvArrival
from runtime.kv_transfer.slices import Runs, pieces
from runtime.kv_transfer.staging import Staging
from runtime.kv_transfer.transports.base import Incoming, Outgoing, Transport
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.codec import encode
from runtime.protocol.framing import Connection


class Tcp(Transport):
    """The bytes of a slice follow its header."""

    name, pulls, window = "tcp", False, 32

    def outgoing(self, connection: Connection) -> Outgoing:
        """The sender's end."""
        return _Outgoing(connection, self.cache)

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """The receiver's end."""
        return _Incoming(connection, self.cache)


class _Outgoing(Outgoing):
    def __init__(self, connection: Connection, cache: PagedCache) -> None:
        self._connection, self._staging, self._sides = connection, Staging(cache), cache.shape.sides

    def send(self, header: KvSlice, runs: Runs) -> None:
        frame = memoryview(encode(header))
        if views := self._staging.in_place(header, runs):
            self._connection.send_buffers([frame, *views])
            return
        self._connection.send_buffers([frame])
        for piece in pieces(header, self._sides, self._staging.piece_bytes):
            part = runs.between(piece.first_token - header.first_token, piece.end_token - header.first_token)
            self._connection.send_buffers([self._staging.load(header, piece, part).numpy().data])


class _Incoming(Incoming):
    def __init__(self, connection: Connection, cache: PagedCache) -> None:
        self._connection, self._staging, self._sides = connection, Staging(cache), cache.shape.sides

    def receive(self, header: KvSlice, arrival: KvArrival | None) -> None:
        if arrival is None:
            self._connection.drain(header.payload_bytes)
        elif views := self._staging.in_place(header, arrival.runs(header.first_token, header.end_token)):
            self._receive_in_place(views, arrival)
        else:
            self._receive_staged(header, arrival)

    def _receive_in_place(self, views: list[memoryview], arrival: KvArrival) -> None:
        """Read from the socket straight into the pool."""
        while views:
            self._connection.wait_readable()
            with arrival.writing() as is_open:
                if is_open:
                    self._connection.receive_some(views)
                    continue
            self._connection.drain(sum(len(view) for view in views))
            return

    def _receive_staged(self, header: KvSlice, arrival: KvArrival) -> None:
        for piece in pieces(header, self._sides, self._staging.piece_bytes):
            self._connection.receive_into(self._staging.room(piece).numpy().data)
            with arrival.writing() as is_open:
                if is_open:
                    self._staging.store(header, piece, arrival.runs(piece.first_token, piece.end_token))
