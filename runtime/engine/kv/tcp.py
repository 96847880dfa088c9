"""KV payloads behind their headers, on the control connection itself: works between any two hosts."""

from __future__ import annotations

from runtime.engine.cache import PagedCache
from runtime.engine.kv.base import Incoming, Outgoing, Transport
from runtime.engine.kv.cells import Runs, Staging, pieces
from runtime.engine.kv.landing import Landing
from runtime.messages import KvOpen, KvSlice, encode
from runtime.transport import Connection


class Tcp(Transport):
    """Bytes follow the header."""

    name, pulls, window = "tcp", False, 32

    def outgoing(self, connection: Connection) -> Outgoing:
        """The sender's end."""
        return _Outgoing(connection, self.cache)

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """The receiver's end."""
        return _Incoming(connection, self.cache)


class _Outgoing(Outgoing):
    def __init__(self, connection: Connection, cache: PagedCache) -> None:
        self._connection, self._staging = connection, Staging(cache)

    def send(self, header: KvSlice, runs: Runs) -> None:
        head = [memoryview(encode(header))]
        for piece in pieces(header):
            part = runs.between(piece.first_token - header.first_token, piece.end_token - header.first_token)
            data = self._staging.in_place(header, piece, part) or [
                self._staging.load(header, piece, part).numpy().data
            ]
            self._connection.send_buffers([*head, *data])
            head = []


class _Incoming(Incoming):
    def __init__(self, connection: Connection, cache: PagedCache) -> None:
        self._connection, self._staging = connection, Staging(cache)

    def receive(self, header: KvSlice, landing: Landing | None) -> None:
        for piece in pieces(header):
            runs = landing.runs(piece.first_token, piece.end_token) if landing else None
            views = self._staging.in_place(header, piece, runs) if runs else []
            if landing and views:
                rest = self._receive_in_place(views, landing)
                self._connection.receive_into(self._staging.room(piece)[:rest].numpy().data)
                continue
            self._connection.receive_into(self._staging.room(piece).numpy().data)
            if landing and runs:
                with landing.writing() as is_open:
                    if is_open:
                        self._staging.store(header, piece, runs)

    def _receive_in_place(self, views: list[memoryview], landing: Landing) -> int:
        """Bytes go into the pool as they come; how many are still to come when the landing is closed."""
        left = sum(len(view) for view in views)
        while left:
            self._connection.wait_readable()
            with landing.writing() as is_open:
                if not is_open:
                    return left
                left -= self._connection.receive_some(views)
        return 0
